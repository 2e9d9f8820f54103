"""The types of `App.consumer`: its options, and decorators that know a topic's body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, overload

from mqlayer.consuming.api.batches import Batch, BatchOf
from mqlayer.consuming.api.context import Context
from mqlayer.consuming.engine.options import MemberOptions
from mqlayer.domain.codecs import Body
from mqlayer.groups.group import Balance, RetrySettings
from mqlayer.groups.start_positions import Start

Answer = TypeVar("Answer")
Dependent = ParamSpec("Dependent")


class ConsumerOptions(RetrySettings, total=False):
    """Keyword arguments of `App.consumer`, which explains them, besides `topic`, `group` and `body`."""

    mode: Literal["exclusive", "shared", "broadcast"]
    start: Start | None
    from_archive: bool
    ordered: bool | None
    balance: Balance | None
    tag_filter: str | None
    visibility_timeout_s: float | None
    batch: BatchOf | None
    rate_limit: float | None
    rate_burst: float | None
    options: MemberOptions | None
    instance: str | None
    instance_expiry_s: float | None


class TypedRegistration(Protocol[Body]):
    """Registers a handler of a typed topic: one of a body, or with `batch` of several."""

    @overload
    def __call__(
        self, handler: Callable[Concatenate[Body, Context, Dependent], Answer], /
    ) -> Callable[Concatenate[Body, Context, Dependent], Answer]: ...
    @overload
    def __call__(self, handler: Callable[[Body], Answer], /) -> Callable[[Body], Answer]: ...
    @overload
    def __call__(
        self, handler: Callable[[list[Body], Batch[Body]], Answer], /
    ) -> Callable[[list[Body], Batch[Body]], Answer]: ...
    @overload
    def __call__(self, handler: Callable[[list[Body]], Answer], /) -> Callable[[list[Body]], Answer]: ...
    @overload
    def __call__(self, handler: Callable[[Batch[Body]], Answer], /) -> Callable[[Batch[Body]], Answer]: ...
    def __call__(self, handler: Any, /) -> Any:
        """Register it and return it unchanged."""
