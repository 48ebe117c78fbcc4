"""Models by name: the demo, and repositories on the Hugging Face hub.

Only configs, safetensors and tokenizers are ever fetched from the hub; no pickles and no code.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from foretell._demo import cached_demo, demo_path
from foretell._errors import DownloadError, ModelNotFoundError

DEMO: Final = "demo"
UNREACHABLE: Final = "the hub cannot be reached"

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
_FILES = [
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE*",
]
_HASHED = (".safetensors", ".json", ".gguf")
# Other copies of the same weights, which repositories keep beside the ones that are read.
_OTHER_COPIES = ["*/*", "consolidated*"]


@dataclass(frozen=True)
class CachedModel:
    """A model on this disk: `name` is what to call it, `size` counts bytes."""

    name: str
    path: Path
    size: int


def is_repository_name(name: str) -> bool:
    """Whether a name has the form of a repository on the hub, "organization/name"."""
    return _REPOSITORY.fullmatch(name) is not None and not name.endswith((".gguf", ".safetensors"))


def list_cached() -> list[CachedModel]:
    """The demo if it was pulled, then the hub's repositories that have a config and safetensors."""
    found = []
    demo = cached_demo()
    if demo is not None:
        found.append(CachedModel(DEMO, demo, demo.stat().st_size))
    return found + _cached_repositories()


def where(name: str) -> Path:
    """Where a model lies on this disk. Raises ModelNotFoundError where it does not."""
    for model in list_cached():
        if model.name == name:
            return model.path
    hint = suggestion(name)
    if not hint and not is_known_form(name):
        hint = "; `foretell models` lists what is"
    raise ModelNotFoundError(
        f"{name!r} is not in the cache" + (hint or f"; pull it with `foretell models pull {name}`")
    )


def is_known_form(name: str) -> bool:
    """Whether a name can be pulled: "demo", or the form of a repository."""
    return name == DEMO or is_repository_name(name)


def suggestion(name: str) -> str:
    """ "; did you mean '...'?" where a model on this machine, or the demo, has a name like that."""
    if name == DEMO:
        return ""
    known = {model.name.lower(): model.name for model in list_cached()} | {DEMO: DEMO}
    close = get_close_matches(name.lower(), known, n=1, cutoff=0.7)
    return f"; did you mean {known[close[0]]!r}?" if close and known[close[0]] != name else ""


def pull(name: str, progress: Callable[[str], None] | None = None) -> Path:
    """Fetch a model by name so that it can be used without a network afterwards.

    Raises ModelNotFoundError for a name that is neither "demo" nor "organization/name", and
    DownloadError.
    """
    if name == DEMO:
        return demo_path(progress)
    if not is_repository_name(name):
        raise ModelNotFoundError(
            f"{name!r} cannot be pulled"
            + (suggestion(name) or "; name a repository on the hub (organization/name) or 'demo'")
        )
    return snapshot_path(name)


def snapshot_path(name: str, *, revision: str | None = None) -> Path:
    """A repository's files on this disk, fetched from the hub where they are not there yet.

    Raises ModelNotFoundError for an unknown repository or revision, and DownloadError.
    """
    import huggingface_hub

    with _explained(name, revision):
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=_FILES, ignore_patterns=_OTHER_COPIES
        )
    return Path(folder)


def require_repository(name: str) -> None:
    """Raise what ``snapshot_path`` raises for a name that is neither cached nor on the hub.

    For libraries that would go on trying for half a minute.
    """
    import huggingface_hub

    with _explained(name, None, "a folder"):
        if not isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
            huggingface_hub.HfApi().model_info(name)


@contextmanager
def _explained(
    name: str, revision: str | None, files: str = "a folder or a .gguf file"
) -> Iterator[None]:
    """Errors of the hub's client as ours; ``files`` is what else could be given."""
    from huggingface_hub import errors
    from huggingface_hub.constants import HF_HUB_OFFLINE

    try:
        yield
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"{name} may be downloaded only by people who accepted its terms; accept them on its "
            "page on the hub and log in with `hf auth login`"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelNotFoundError(
            f"the hub has no repository {name!r} (or it is private and you are not logged in: "
            f"`hf auth login`), and there is no folder {name} here either{suggestion(name)}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{name} has no revision {revision!r} on the hub") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        why = "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else UNREACHABLE
        raise DownloadError(_not_here(name, why, files)) from error
    except (OSError, ValueError, RuntimeError) as error:
        # Everything else: a server's error, a full disk.
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DownloadError(
            f"{name} could not be fetched from the hub ({reason}); try again, or give the path of "
            f"{files} (`foretell models` lists what is here)"
        ) from error
    except Exception as error:
        # The hub's client raises its HTTP library's own errors too, of which we import none.
        if "connect" in type(error).__name__.lower():
            raise DownloadError(_not_here(name, UNREACHABLE, files)) from error
        raise DownloadError(f"{name} could not be fetched from the hub ({error})") from error


def _not_here(name: str, why: str, files: str) -> str:
    return f"{name} is not in the hub's cache on this machine, and {why}" + (
        suggestion(name)
        or "; check the name and the network, or give the path of "
        f"{files} (`foretell models` lists what is here)"
    )


def files_hash(source: str | Path) -> str | None:
    """SHA-256 of a model's file; of a folder, of its files' names and contents in order."""
    path = files_of(source)
    if path is None:
        return None
    whole = hashlib.sha256()
    if path.is_file():
        _add_file(whole, path)
    else:
        for file in sorted(path.iterdir()):
            if file.suffix in _HASHED and file.is_file():
                whole.update(file.name.encode() + b"\0")
                _add_file(whole, file)
    return "sha256:" + whole.hexdigest()


def files_of(source: str | Path) -> Path | None:
    """The file or folder of a model, fetched if it is not there yet; None for what is no name."""
    path = Path(source)
    if path.exists():
        return path
    if str(source) == DEMO:
        return demo_path()
    return snapshot_path(str(source)) if is_repository_name(str(source)) else None


def _add_file(whole: Any, file: Path) -> None:
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            whole.update(chunk)


def _cached_repositories() -> list[CachedModel]:
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = huggingface_hub.scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, ValueError, OSError):
        return []
    models = []
    for repository in sorted(repositories, key=lambda repository: repository.repo_id):
        if repository.repo_type != "model":
            continue
        newest = max(repository.revisions, key=lambda one: one.last_modified, default=None)
        names = set() if newest is None else {file.file_name for file in newest.files}
        if newest is None or "config.json" not in names:
            continue
        if any(name.endswith(".safetensors") for name in names):
            models.append(
                CachedModel(repository.repo_id, newest.snapshot_path, newest.size_on_disk)
            )
    return models


__all__ = [
    "DEMO",
    "CachedModel",
    "cached_demo",
    "demo_path",
    "is_repository_name",
    "list_cached",
    "pull",
    "require_repository",
    "snapshot_path",
    "suggestion",
    "where",
]
