"""Options of `group set`."""

from __future__ import annotations

from typing import Annotated

import typer

from mqlayer.domain.retry_rules import POLICIES

BackoffOption = Annotated[
    str | None,
    typer.Option(
        metavar="S,S,…",
        help="Seconds between attempts, the last for all further; exponential:1,2,600 (first, factor, limit).",
    ),
]
JitterOption = Annotated[
    float | None, typer.Option(metavar="PART", help="Which part of a wait may be left out by chance: 0 to 1.")
]
AttemptsOption = Annotated[int | None, typer.Option(help="Failed attempts after which the policy decides.")]
PolicyOption = Annotated[
    str | None, typer.Option(metavar="|".join(POLICIES), help="What is done with a message that failed for good.")
]
NonRetryableOption = Annotated[
    str | None, typer.Option(metavar="E,E,…", help="Exceptions that are not worth another attempt; or none.")
]
RetryableOption = Annotated[
    str | None, typer.Option(metavar="E,E,…", help="The only exceptions that are tried again; or all.")
]
TimeLimitOption = Annotated[
    str | None, typer.Option(metavar="S", help="Seconds that a handler has for a message; or none.")
]
MaxTimeLimitOption = Annotated[
    str | None, typer.Option(metavar="S", help="Seconds up to which a handler may extend its time; or none.")
]
ParkedKeysOption = Annotated[int | None, typer.Option(help="Parked keys of a partition, at most.")]
ParkedMessagesOption = Annotated[int | None, typer.Option(help="Parked messages of the group, at most.")]
ParkedBytesOption = Annotated[int | None, typer.Option(help="Parked bytes of the group, at most.")]
KeyMessagesOption = Annotated[int | None, typer.Option(help="Parked messages of one key, at most.")]
KeyBytesOption = Annotated[int | None, typer.Option(help="Parked bytes of one key, at most.")]
BalanceOption = Annotated[
    str | None, typer.Option(metavar="count|rate", help="Spread partitions by count, or by what is published.")
]
TagFilterOption = Annotated[
    str | None,
    typer.Option(metavar="any:T,T|all:T,T|none", help="Only messages with any, or all, of these tags; or none."),
]
InstanceExpiryOption = Annotated[
    float | None, typer.Option(metavar="S", help="Seconds for which an instance that is away keeps its position.")
]
RateOption = Annotated[
    str | None, typer.Option(metavar="N", help="Messages per second that the group begins, at most; or none.")
]
BurstOption = Annotated[
    str | None, typer.Option(metavar="N", help="Messages begun at once after idle time; none: one second's.")
]
BreakerOption = Annotated[
    str | None, typer.Option(metavar="SHARE", help="Share of failing keys that opens the circuit breaker; or none.")
]
BreakerKeysOption = Annotated[int | None, typer.Option(help="Failing keys that it takes at least.")]
BreakerWindowOption = Annotated[float | None, typer.Option(metavar="S", help="Seconds within which keys count for it.")]
BreakerErrorsOption = Annotated[
    str | None, typer.Option(metavar="E,E,…", help="The only exceptions that count for it; or all.")
]
KeyClassOption = Annotated[
    str | None,
    typer.Option(metavar="prefix:SEP|header:NAME|none", help="What classes of keys, which take turns, go by."),
]
ClassConcurrencyOption = Annotated[
    str | None, typer.Option(metavar="N", help="Keys of a class that a member handles at once; or none.")
]
ClassRateOption = Annotated[
    str | None, typer.Option(metavar="N", help="Messages of a class that the group begins per second; or none.")
]
IfVersionOption = Annotated[int | None, typer.Option(min=1, help="Refuse unless the settings are at this version.")]
