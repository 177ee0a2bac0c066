"""One bucket by boto3: its calls, which block, in threads; its errors, in our tree."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from ..errors import StorageError
from .settings import S3

PIECE = 256 * 1024
_TRIES = 3
_PAGE = 1000
_MAX_LISTED = 1_000_000
_USERINFO_RE = re.compile(r"//[^/@]*@")
_MD5_RE = re.compile(r"[0-9a-f]{32}(-[0-9]{1,5})?\Z")

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """``work`` in a thread that nobody waits for at the end: one that hangs in a socket holds up neither Ctrl-C nor the
    end of the program."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)  # type: ignore[arg-type]

    def main() -> None:
        value: T | None = None
        failure: BaseException | None = None
        try:
            value = work()
        except BaseException as error:
            failure = error
        try:
            loop.call_soon_threadsafe(settle, value, failure)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more

    threading.Thread(target=main, name="sloplet-s3", daemon=True).start()
    return await future


class Bucket:
    """Calls to S3 about one bucket. Everything raised is a StorageError."""

    def __init__(self, name: str, client: Any) -> None:
        self.name = name
        self._client = client

    @staticmethod
    @asynccontextmanager
    async def open(name: str, settings: S3 | None) -> AsyncIterator[Bucket]:
        client = await in_thread(lambda: _client(settings or S3()))
        try:
            yield Bucket(name, client)
        finally:
            client.close()

    async def call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        method = getattr(self._client, operation)
        where = f"s3://{self.name}/{arguments.get('Key', '')}"
        try:
            answer: dict[str, Any] = await in_thread(lambda: method(Bucket=self.name, **arguments))
        except Exception as error:
            raise storage_error(error, where) from error
        return answer

    async def head(self, key: str) -> dict[str, Any] | None:
        """What S3 says of an object; None if there is none of that key."""
        try:
            return await self.call("head_object", Key=key)
        except StorageError as error:
            if error_code(error.__cause__) in ("404", "NoSuchKey", "NotFound"):
                return None
            raise

    async def check(self) -> None:
        """What can be known beforehand: that there are credentials, a server and the bucket. Whether one may write
        there only writing tells."""
        try:
            await self.call("head_bucket")
        except StorageError as error:
            code = error_code(error.__cause__)
            if code in ("404", "NoSuchBucket"):
                what, hint = _CODES["NoSuchBucket"]
                raise StorageError(f"s3://{self.name}: {what}", hint=hint) from error
            if not code:
                raise

    async def list(self, prefix: str) -> list[dict[str, Any]]:
        """All objects whose keys begin so."""
        found: list[dict[str, Any]] = []
        more: dict[str, str] = {}
        while True:
            page = await self.call("list_objects_v2", Prefix=prefix, MaxKeys=_PAGE, **more)
            found += page.get("Contents", ())
            token = page.get("NextContinuationToken")
            if not page.get("IsTruncated") or not token:
                return found
            if len(found) > _MAX_LISTED or not page.get("Contents"):
                raise StorageError(
                    f"s3://{self.name}/{prefix} holds more than can be listed at once", hint="copy its folders by turns"
                )
            more = {"ContinuationToken": token}

    async def pieces(self, key: str, first: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        """The bytes of an object, from the answer to ``get_object``. A connection that breaks is made anew from where
        it was, of the same version of the object."""
        answer, size, etag = first, int(first["ContentLength"]), first.get("ETag")
        position, tries = 0, 1
        while True:
            body = answer["Body"]
            try:
                while piece := await in_thread(partial(body.read, PIECE)):
                    position += len(piece)
                    if position > size:
                        break
                    yield piece
                if position == size:
                    return
                failure = StorageError(f"s3://{self.name}/{key}: {position} of {size} bytes came", hint="try again")
            except StorageError:
                raise
            except Exception as error:
                failure = storage_error(error, f"s3://{self.name}/{key}")
            finally:
                if position != size:
                    abandon(answer)
            tries += 1
            if tries > _TRIES or position > size:
                raise failure
            same = {"IfMatch": etag} if etag else {}
            answer = await self.call("get_object", Key=key, Range=f"bytes={position}-", **same)
            if answer.get("ETag") != etag or int(answer["ContentLength"]) != size - position:
                abandon(answer)
                raise failure


def abandon(answer: Mapping[str, Any]) -> None:
    """Close the connection of a body that is not read to its end. A thread may still read it, and closing waits for
    that: so a thread does it."""
    threading.Thread(target=answer["Body"].close, name="sloplet-s3", daemon=True).start()


def is_md5(answer: Mapping[str, Any]) -> bool:
    """Whether the ETag of an answer is made of MD5 sums of the content: unless keys of the user's encrypt it."""
    if answer.get("SSECustomerAlgorithm") or answer.get("ServerSideEncryption") not in (None, "AES256"):
        return False
    return _MD5_RE.match(etag_of(answer)) is not None


def etag_of(answer: Mapping[str, Any]) -> str:
    return str(answer.get("ETag", "")).strip('"')


def _client(settings: S3) -> Any:
    try:
        import botocore.session
        from botocore import UNSIGNED
        from botocore.config import Config
    except ImportError:
        raise StorageError("S3 needs boto3, which is not installed", hint="pip install 'sloplet[s3]'") from None
    try:
        session = botocore.session.Session(profile=settings.profile)
        config = Config(
            connect_timeout=10,
            read_timeout=60,
            max_pool_connections=16,
            # Contents are checked by MD5 and ETag, which every S3 has; newer sums fail with some that are not Amazon's.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            user_agent_extra="sloplet",
            **({"signature_version": UNSIGNED} if settings.anonymous else {}),
        )
        if session.get_config_variable("max_attempts") is None and session.get_config_variable("retry_mode") is None:
            config = config.merge(Config(retries={"mode": "standard", "total_max_attempts": _TRIES}))
        return session.create_client(
            "s3", region_name=settings.region, endpoint_url=settings.endpoint_url, config=config
        )
    except Exception as error:
        raise storage_error(error, settings.endpoint_url or "S3") from error


_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or run `aws configure`"
#: botocore's exceptions by name: (what happened, what to do).
_FAILURES = {
    "NoCredentialsError": ("no credentials were found", _CREDENTIALS + "; --no-sign-request for public buckets"),
    "PartialCredentialsError": ("the credentials are incomplete", _CREDENTIALS),
    "CredentialRetrievalError": ("the credentials could not be had", _CREDENTIALS),
    "TokenRetrievalError": ("the login has expired", "run `aws sso login`"),
    "ProfileNotFound": ("there is no such profile", "see ~/.aws/config, AWS_PROFILE"),
    "EndpointConnectionError": ("the server cannot be reached", "check --endpoint-url, AWS_ENDPOINT_URL, the network"),
    "ConnectTimeoutError": ("the server cannot be reached", "check --endpoint-url, AWS_ENDPOINT_URL, the network"),
    "ReadTimeoutError": ("the server does not answer", "try again later"),
    "ConnectionClosedError": ("the server ended the connection", "try again later"),
    "SSLError": ("its certificate is not good", "AWS_CA_BUNDLE names the authority to trust"),
    "InvalidRegionError": ("that is not a region", "check AWS_REGION"),
}
#: S3's own codes.
_CODES = {
    "NoSuchBucket": ("there is no such bucket", "check its name and --endpoint-url"),
    "NoSuchKey": ("there is no such object", "check the key"),
    "404": ("there is no such object", "check the key"),
    "AccessDenied": ("access is denied", "these credentials may not do that: check the bucket's policy"),
    "403": ("access is denied", "these credentials may not do that: check the bucket's policy"),
    "InvalidAccessKeyId": ("the access key is not known there", _CREDENTIALS),
    "SignatureDoesNotMatch": ("the secret key is wrong", _CREDENTIALS),
    "ExpiredToken": ("the credentials have expired", _CREDENTIALS),
    "InvalidToken": ("the session token is not valid", _CREDENTIALS),
    "RequestTimeTooSkewed": ("this machine's clock is wrong", "set the clock"),
    "PreconditionFailed": ("the object was replaced while it was being copied", "try again"),
    "412": ("the object was replaced while it was being copied", "try again"),
    "BadDigest": ("the content was damaged on its way", "try again"),
    "503": ("the server is overloaded", "try again later"),
    "SlowDown": ("the server is overloaded", "try again later"),
    "PermanentRedirect": ("the bucket is in another region", "set AWS_REGION"),
    "AuthorizationHeaderMalformed": ("the bucket is in another region", "set AWS_REGION"),
}


def error_code(error: BaseException | None) -> str:
    """S3's own code of an error of botocore's, or nothing."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def storage_error(error: Exception, where: str) -> StorageError:
    """Any failure of a call, with what to do next."""
    if isinstance(error, StorageError):
        return error
    code = error_code(error)
    for name in [code, *(kind.__name__ for kind in type(error).__mro__)]:
        if known := _CODES.get(name) or _FAILURES.get(name):
            return StorageError(f"{where}: {known[0]}", hint=known[1])
    said = _USERINFO_RE.sub("//", " ".join(str(error).split()))[:300]
    return StorageError(f"{where}: {said or type(error).__name__}")
