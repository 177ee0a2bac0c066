"""A real S3 server (moto's) as a process of its own on loopback, and a plain boto3 client to look at it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: What AWS's libraries read; none of the machine's own is to count in a test.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test-key-id",
    "AWS_SECRET_ACCESS_KEY": "test-secret-key",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


@contextmanager
def s3_server() -> Iterator[str]:
    """Yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    environment = {**os.environ, **CREDENTIALS}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        until = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, "moto's server did not start"
                assert time.monotonic() < until, "moto's server does not answer"
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


class Buckets:
    """The server's content, read and written past our own code."""

    def __init__(self, url: str) -> None:
        import boto3

        self.url = url
        self.client: Any = boto3.client(
            "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
        )

    def make(self, name: str) -> str:
        self.client.create_bucket(Bucket=name)
        return name

    def keys(self, bucket: str) -> list[str]:
        found = self.client.list_objects_v2(Bucket=bucket).get("Contents", [])
        return sorted(item["Key"] for item in found)

    def read(self, bucket: str, key: str) -> bytes:
        data: bytes = self.client.get_object(Bucket=bucket, Key=key)["Body"].read()
        return data

    def write(self, bucket: str, key: str, data: bytes = b"x") -> None:
        self.client.put_object(Bucket=bucket, Key=key, Body=data)

    def unfinished(self, bucket: str) -> list[Any]:
        found: list[Any] = self.client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
        return found

    def close(self) -> None:
        self.client.close()
