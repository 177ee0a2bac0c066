"""Where an S3 is and whose, where that is not what the environment says."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SpecError


@dataclass(frozen=True)
class S3:
    """Which S3, and as whom. What is None is as boto3 finds it: AWS_ENDPOINT_URL_S3, AWS_PROFILE, ~/.aws and so on.
    Access keys are never given here: they belong in the environment, a profile or a role."""

    endpoint_url: str | None = None  #: http://127.0.0.1:9000, for what is not Amazon's
    profile: str | None = None
    region: str | None = None
    anonymous: bool = False  #: unsigned, for public buckets

    def __post_init__(self) -> None:
        for name in ("profile", "region"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value or not value.isprintable()):
                raise SpecError(f"S3({name}={str(value)[:80]!r}) is not valid", hint="a non-empty text")
        url = self.endpoint_url
        if isinstance(url, str) and "@" in url.partition("?")[0]:
            raise SpecError("S3(endpoint_url=...) has a name or a password in it", hint="keys belong into AWS_PROFILE")
        if url is not None and (not isinstance(url, str) or not url.startswith(("http://", "https://"))):
            raise SpecError(f"{str(url)[:80]!r} is not the URL of a server", hint="for example http://127.0.0.1:9000")
