"""What a server is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass

from foretell._errors import OptionError

MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """Limits and habits of a server. Raises OptionError for what makes no sense.

    - ``model_name``: what requests must call the model.
    - ``api_keys``: without any, everybody may ask.
    - ``max_queue``: requests that may wait; ``max_running``: completions that run at a time.
    - ``max_request_tokens``: prompt and answer of a completion (None: the model's context);
      ``max_total_tokens``: those of all that run together; ``memory_bytes``: what they may take.
      Who does not fit at the moment waits.
    - ``default_max_tokens``: for requests that do not say how long an answer may be.
    - ``prefix_cache_bytes``: that much of the memory keeps the beginnings of earlier prompts.
    - ``request_timeout`` and ``grace`` (for those who run when the server is stopped): seconds.
    - ``cors_origins``: other sites whose pages may ask; ``allowed_hosts``: names of this machine
      in addresses, besides localhost and plain IP addresses.
    - ``log_prompts``: put prompts and answers into the log.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    max_queue: int = 256
    max_running: int = 64
    max_request_tokens: int | None = None
    max_total_tokens: int | None = None
    default_max_tokens: int = 1024
    memory_bytes: int = 1024 * MIB
    prefix_cache_bytes: int = 256 * MIB
    max_body_bytes: int = 4 * MIB
    request_timeout: float = 600.0
    grace: float = 30.0
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    log_prompts: bool = False

    def __post_init__(self) -> None:
        for name in (
            "max_queue",
            "max_running",
            "default_max_tokens",
            "memory_bytes",
            "max_body_bytes",
        ):
            self._check(name, 1)
        for name in ("prefix_cache_bytes", "request_timeout", "grace"):
            self._check(name, 0)
        for name in ("max_request_tokens", "max_total_tokens"):
            if getattr(self, name) is not None:
                self._check(name, 2)
        if not all(map(_can_be_sent, self.api_keys)):
            raise OptionError(
                "an API key is empty, begins or ends with a space, or holds characters that no "
                "HTTP header can carry; use printable ASCII"
            )
        if not all(map(_can_be_sent, self.allowed_hosts)):
            raise OptionError(
                "an allowed host is empty or no name that a Host header can hold; use a name like "
                "example.org"
            )
        if "*" in self.cors_origins and self.api_keys == ():
            raise OptionError(
                "a server without API keys that allows every origin answers any page its users "
                "visit; name the origins, or set an API key"
            )

    def _check(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not value >= least:
            raise OptionError(f"{name} is {value}; use {least} or more")


def _can_be_sent(value: str) -> bool:
    """Whether a header can hold it, and whoever reads the header finds all of it."""
    return value != "" and value.isascii() and value.isprintable() and value == value.strip()
