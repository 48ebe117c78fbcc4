"""Speculative decoding that makes language models faster without changing one token."""
