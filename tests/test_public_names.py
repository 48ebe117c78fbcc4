"""The public names, pinned: adding or removing one is a decision, not an accident."""

import foretell

PUBLIC_NAMES = """
    Accepted Capabilities CapabilityError Chat ContextLengthError CorruptModelError DownloadError
    Draft Drafter EmptyPromptError Engine Event FinishReason ForetellError Generation InputError
    InsufficientMemoryError MissingExtraError Model ModelError ModelNotFoundError OptionError
    Origin Output Rows SamplingParams Session Stats TokenLogprobs Tokenizer TokenizerError
    UnsupportedModelError VocabularyMismatchError __version__ generate
""".split()


def test_the_public_names_are_these():
    assert foretell.__all__ == PUBLIC_NAMES


def test_every_public_name_is_there_and_documented():
    for name in PUBLIC_NAMES:
        assert hasattr(foretell, name)
        if name != "__version__":
            assert getattr(foretell, name).__doc__, f"{name} has no docstring"


def test_every_error_is_public():
    from foretell import _errors

    errors = {name for name, value in vars(_errors).items() if isinstance(value, type)}
    assert errors <= set(PUBLIC_NAMES)
