"""Bodies as objects of an S3 API. Credentials come from the client's own chain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from importlib.util import find_spec
from itertools import chain
from typing import Any, Final, NamedTuple, TypeVar

from mqlayer.errors import InvalidInput, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.large_bodies.options import LargeBodyOptions

T = TypeVar("T")
ATTEMPTS: Final = 3
TIMEOUT_S: Final = 30.0


class StoredObject(NamedTuple):
    """An object of a listing."""

    location: str
    size: int
    changed_at: datetime


class StoredUpload(NamedTuple):
    """An upload without its end."""

    location: str
    upload_id: str
    begun_at: datetime


class ObjectStore:
    """An S3 API. Raises StoreUnavailable."""

    def __init__(self, endpoint: str, region: str) -> None:
        self._client: Any = _client(endpoint, region)
        self.address = f"S3 at {endpoint or 'AWS'}"

    def put(self, bucket: str, location: str, body: bytes) -> None:
        """Write an object."""
        self._call(lambda: self._client.put_object(Bucket=bucket, Key=location, Body=body))

    def upload(self, bucket: str, location: str, parts: Iterator[bytes]) -> None:
        """Write an object part by part; one part by itself is written at once. An error leaves nothing."""
        first = next(parts, b"")
        second = next(parts, None)
        if second is None:
            self.put(bucket, location, first)
            return
        place = {"Bucket": bucket, "Key": location}
        upload: Any = self._call(lambda: self._client.create_multipart_upload(**place))
        place["UploadId"] = upload["UploadId"]
        try:
            done = []
            for number, part in enumerate(chain((first, second), parts), 1):
                facts = {**place, "PartNumber": number, "Body": part}
                answer: Any = self._call(lambda facts=facts: self._client.upload_part(**facts))
                done.append({"PartNumber": number, "ETag": answer["ETag"]})
                failpoint("large_body.in_upload")
            self._call(lambda: self._client.complete_multipart_upload(**place, MultipartUpload={"Parts": done}))
        except BaseException:
            with suppress(StoreUnavailable):
                self._call(lambda: self._client.abort_multipart_upload(**place), none=True)
            raise

    def uploads(self, bucket: str, prefix: str) -> Iterator[StoredUpload]:
        """Yield up to 1,000 unfinished uploads."""
        page: Any = self._call(lambda: self._client.list_multipart_uploads(Bucket=bucket, Prefix=prefix), none=True)
        for one in (page or {}).get("Uploads", ()):
            yield StoredUpload(one["Key"], one["UploadId"], one["Initiated"])

    def abort(self, bucket: str, upload: StoredUpload) -> None:
        """Remove an unfinished upload, if there."""
        place = {"Bucket": bucket, "Key": upload.location, "UploadId": upload.upload_id}
        self._call(lambda: self._client.abort_multipart_upload(**place), none=True)

    def get(self, bucket: str, location: str, start: int, size: int) -> bytes | None:
        """Return bytes of an object, fewer behind its end; None without one."""
        asked = {"Bucket": bucket, "Key": location, "Range": f"bytes={start}-{start + size - 1}"}
        return self._call(lambda: bytes(self._client.get_object(**asked)["Body"].read()), none=True)

    def delete(self, bucket: str, location: str) -> None:
        """Delete an object, if there."""
        self._call(lambda: self._client.delete_object(Bucket=bucket, Key=location), none=True)

    def check(self, bucket: str) -> None:
        """Ask for one name of a bucket."""
        self._call(lambda: self._client.list_objects_v2(Bucket=bucket, MaxKeys=1))

    def list(self, bucket: str, prefix: str, start: str) -> Iterator[list[StoredObject]]:
        """Yield pages of up to 1,000 objects behind `start`."""
        token: dict[str, str] = {"StartAfter": start}
        while True:
            page = self._call(lambda more=token: self._client.list_objects_v2(Bucket=bucket, Prefix=prefix, **more))
            yield [
                StoredObject(one["Key"], one["Size"], one["LastModified"]) for one in (page or {}).get("Contents", ())
            ]
            if not page or not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def _call(self, work: Callable[..., T], *, none: bool = False) -> T | None:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return work()
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            if none and code in ("NoSuchKey", "NoSuchUpload", "404", "NotFound", "InvalidRange"):
                return None
            raise StoreUnavailable(self.address, f"it answered {code or 'an error'}") from None
        except (BotoCoreError, OSError) as error:
            # Its text may show a signed address.
            raise StoreUnavailable(self.address, type(error).__name__) from None


def object_store(options: LargeBodyOptions) -> ObjectStore:
    """Return a process's client; needs the extra `s3`."""
    return _store(options.endpoint, options.region)


@lru_cache(maxsize=8)
def _store(endpoint: str, region: str) -> ObjectStore:
    return ObjectStore(endpoint, region)


def _client(endpoint: str, region: str) -> Any:
    if find_spec("boto3") is None:
        raise InvalidInput("large bodies in S3 need more packages: pip install 'mqlayer[s3]'")
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=5,
        read_timeout=TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        # Servers other than AWS may not know the newer checksums; the reference has a SHA-256.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    given = {"endpoint_url": endpoint or None, "region_name": region or None}
    return boto3.session.Session().client("s3", config=config, **given)
