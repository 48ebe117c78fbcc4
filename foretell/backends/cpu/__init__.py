"""The cpu backend: row-invariant kernels in Numba, without torch."""

from foretell.backends.cpu._model import CpuModel, load

__all__ = ["CpuModel", "load"]
