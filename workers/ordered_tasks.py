"""Celery tasks whose calls run in order per key.

```python
@ordered_task(celery_app, key="account")
def book(account: str, amount: int) -> None: ...

book.delay("a-1", 5)                            # a message of the topic "tasks" under the key "a-1"
book.delay_in(session, "a-1", 5)                # with the transaction: through the outbox

consumers = mqlayer.App()
consume_tasks(consumers, celery_app)            # MQLAYER_CONSUMERS=shop.tasks:consumers, or `mqlayer consume`
```

A broker hands tasks out to whoever is free, and a retry goes to the end of the queue: no order per key. So a call does
not go to the broker. It is a message: published straight to its topic, or with a transaction through the outbox, and
run by the members of a group, which have the order. Around the body is Celery's own tracer: the request, results,
signals and hooks are those of any task.

States of a call: *asked* -> *stored* -> *running* -> *done*; or *running* -> *waiting* after an exception, counted as a
failed attempt, and again *running* after the group's backoff; its key waits with it, others go on. Celery sees a retry
each time, never a failure: the call is not over, and whoever waits for its result must not be told so.

Who dies when:

- the caller before the message is stored: nobody called. After that, before `delay` returned: the call runs.
  PublishUnknown says that this is open; the producer goes on with it. In a transaction: COMMIT decides, a relay sends.
- the worker in the body, or after it and before its result is stored: the lease runs out, the next owner runs it again
  under a higher epoch, before any later call of the key. Effects in Postgres happen once with `self.fence(connection)`.
- the worker after the result is stored and before the message is settled: the same; the result is stored twice.
- a worker that is stopped and woken: its acknowledgement and its fenced effect are refused. Its result may be stored
  late; that of the next owner is of the same call.
- the result backend: the call is settled when its body returned; a result that can't be stored is logged and lost.

A call that reached a broker by other ways (`send_task` by name, messages from before the task became ordered) is passed
on to the topic by the worker that gets it; its place in the order is the one that it has then.
"""

from __future__ import annotations

import inspect
import logging
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Unpack

from celery import Celery, Task, shared_task, uuid
from celery.app.trace import build_tracer
from celery.exceptions import Ignore, Retry
from celery.result import denied_join_result

from mqlayer.consuming import App, Context, MemberOptions
from mqlayer.consuming.engine.error_text import where
from mqlayer.consuming.engine.timeouts import HandlerInterrupt, timed_out
from mqlayer.domain.names import check_name
from mqlayer.errors import BodyMismatch, FenceError, HandlerFault, InvalidInput, NotFound
from mqlayer.failpoints import failpoint
from mqlayer.groups.group import RetrySettings
from mqlayer.groups.start_positions import Start
from mqlayer.outbox import publish
from mqlayer.workers import connections
from mqlayer.workers.task_messages import (
    BODY,
    Key,
    TaskCall,
    arguments_of,
    as_request,
    call_of,
    check_body,
    check_options,
    check_task_options,
    decode,
    encode,
    key_of,
)

log = logging.getLogger(__name__)

TOPIC: Final = "tasks"
GROUP: Final = "tasks"
RUN: Final = "mqlayer_run"
"""Where the request has the run that it belongs to."""


@dataclass(slots=True)
class TaskRun:
    """One run of a body for a message: what the member has to know of it, past Celery's tracer."""

    context: Context
    begun: bool = False
    finished: bool = False
    error: BaseException | None = None


class OrderedTask(Task):
    """A task whose calls run in order per key. Made by `ordered_task`, or `app.task(base=OrderedTask, key=…)`."""

    abstract = True
    key: Key = ""
    topic: str = TOPIC

    def __init_subclass__(cls, **options: Any) -> None:
        """Check what the decorator was given; Celery makes a class of each task."""
        super().__init_subclass__(**options)
        if inspect.isfunction(cls.__dict__.get("key")):
            # Or it would become a method.
            cls.key = staticmethod(cls.__dict__["key"])
        run = cls.__dict__.get("run")
        if run is not None:
            name = str(cls.__dict__.get("name") or cls.__name__)
            check_name("topic", cls.topic)
            check_task_options(name, cls.__dict__)
            check_body(name, run.__func__ if isinstance(run, staticmethod) else run, cls.key)

    # -- calls -------------------------------------------------------------------------------------------------------

    def apply_async(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        task_id: str | None = None,
        **options: Any,
    ) -> Any:
        """Publish a call to the task's topic, behind the earlier ones of its key; return its AsyncResult.

        Order is that of the calls by one thread. Returns when the message is stored: a refusal or an outage is raised
        here (PublishError and its kinds, StoreUnavailable). Raises InvalidInput for options that an ordered call can't
        keep, for arguments that are not JSON and for what is no key; TypeError for arguments that don't fit the body.
        """
        return self._call(None, args, kwargs, task_id, options)

    def delay_in(self, connection: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the task with the caller's transaction: it runs if that commits, else it was never called.

        `connection` is what `mqlayer.outbox.publish` takes, and its errors are those of that function. Calls of a key
        run in the order in which their transactions commit. Where both this and `delay` are used for one key, they keep
        their own orders each, not one.
        """
        return self._call(connection, args, kwargs, None, {})

    def apply_async_in(
        self,
        connection: Any,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        task_id: str | None = None,
        **options: Any,
    ) -> Any:
        """Do the same with options of the call."""
        return self._call(connection, args, kwargs, task_id, options)

    def _call(
        self,
        connection: Any,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        task_id: str | None,
        options: dict[str, Any],
    ) -> Any:
        args, kwargs, task_id = args or (), kwargs or {}, task_id or uuid()
        check_options(self.name, options)
        if self.typing and hasattr(self, "__header__"):
            self.__header__(*args, **kwargs)
        key = key_of(self.name, self.key, self.run, args, kwargs)
        parent = self.app.current_worker_task
        if parent is not None:
            options.setdefault("parent_id", parent.request.id)
            options.setdefault("root_id", parent.request.root_id or parent.request.id)
        call = call_of(self.name, task_id, args, kwargs, options)
        body = encode(call)
        if self.app.conf.task_always_eager:
            return self._eagerly(arguments_of(call), task_id, options)
        if connection is not None:
            publish(connection, self.topic, key=key, body=body)
        else:
            connections.producer().send(self.topic, key=key, body=body)
        result = self.AsyncResult(task_id)
        if parent is not None and options.get("add_to_parent", True):
            parent.add_trail(result)
        return result

    def _eagerly(self, arguments: tuple[list[Any], dict[str, Any]], task_id: str, options: Mapping[str, Any]) -> Any:
        with denied_join_result():
            return self.apply(*arguments, task_id=task_id, headers=options.get("headers"))

    def map(self, *_: Any) -> NoReturn:
        """Refused: it calls bodies in one go, past every order."""
        raise InvalidInput(f"ordered task {self.name!r}: call it once for each item")

    def starmap(self, *_: Any) -> NoReturn:
        """Refused, as `map` is."""
        self.map()

    def chunks(self, *_: Any) -> NoReturn:
        """Refused, as `map` is."""
        self.map()

    # -- in the body -------------------------------------------------------------------------------------------------

    @property
    def message(self) -> Context | None:
        """The message under way: key, attempt, identity, epoch; None where the body was called directly or eagerly."""
        run = _run_of(self)
        return run.context if run is not None else None

    def fence(self, connection: Any) -> None:
        """Let the effects of this transaction happen once, and never by a worker that lost its right: `Context.fence`.

        Call it first in the transaction, and let what it raises pass. Where the body was called directly or eagerly
        there is no message, and it does nothing.
        """
        context = self.message
        if context is not None:
            context.fence(connection)

    def retry(
        self,
        args: Any = None,
        kwargs: Any = None,
        exc: BaseException | None = None,
        throw: bool = True,  # noqa: FBT001, FBT002  # Celery's signature
        eta: Any = None,
        countdown: Any = None,
        max_retries: Any = None,
        **options: Any,
    ) -> Any:
        """End this attempt as a failed one: the message is tried again after the group's backoff, its key waits.

        It always raises. No second message is made, so `eta`, `countdown` and `max_retries` are not looked at: when is
        the group's matter, and no call is dropped. A call that is stored takes no other arguments: InvalidInput.
        """
        if _run_of(self) is None:
            return super().retry(args, kwargs, exc, throw, eta, countdown, max_retries, **options)
        if args is not None or kwargs is not None or options:
            raise InvalidInput(f"ordered task {self.name!r}: a retry keeps its arguments and takes no options")
        cause = exc or sys.exc_info()[1]
        raise _retry_error(cause) from cause

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body: as Celery does where it was called directly or eagerly, else for the message under way."""
        run = _run_of(self)
        if run is not None and not run.begun:
            return self._run(run, args, kwargs)
        if self.request.called_directly:
            return super().__call__(*args, **kwargs)
        if run is not None or self.request.is_eager:
            return self.run(*args, **kwargs)
        return self._pass_on(args, kwargs)

    def _run(self, run: TaskRun, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        run.begun = True
        try:
            failpoint("ordered.before_body")
            answer = self.run(*args, **kwargs)
            failpoint("ordered.after_body")
        except Ignore:
            raise
        except FenceError as error:
            # Not Celery's matter: the effect is there, or is the next owner's.
            run.error = error
            raise Ignore from error
        except Retry as asked:
            run.error = asked.exc if isinstance(asked.exc, BaseException) else asked
            raise
        except HandlerInterrupt as end:
            # For Celery an error like others.
            run.error = timed_out(end)
            raise _retry_error(run.error) from end
        except Exception as error:
            run.error = error
            raise _retry_error(error) from error
        run.finished = True
        return answer

    def _pass_on(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
        """Send a call to the topic that a broker brought here."""
        request = self.request
        options = {"headers": request.headers, "root_id": request.root_id, "parent_id": request.parent_id}
        self._call(None, args, kwargs, request.id, options | {"add_to_parent": False})
        raise Ignore


def ordered_task(
    app: Celery | None = None, *, key: Key, topic: str = TOPIC, **options: Any
) -> Callable[[Callable[..., Any]], Any]:
    """Make a function a Celery task whose calls run in order per key; of the current application where none is given.

    `key` is the name of the parameter that is the key, or a function that is called with the call's arguments and
    returns it: text, a whole number or a UUID. Calls go to `topic`, which must exist, and are run by whoever called
    `consume_tasks` for it. `options` are those of `app.task`, such as name, bind, ignore_result. Raises InvalidInput
    for those that would be without effect.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        name = str(options.get("name") or function.__name__)
        check_name("topic", topic)
        check_task_options(name, options)
        check_body(name, function, key)
        make = app.task if app is not None else shared_task
        return make(base=OrderedTask, key=key, topic=topic, **options)(function)

    return decorate


def consume_tasks(
    consumers: App,
    app: Celery,
    *,
    topic: str = TOPIC,
    group: str = GROUP,
    start: Start = "earliest",
    options: MemberOptions | None = None,
    **rules: Unpack[RetrySettings],
) -> None:
    """Run the calls of a Celery application's ordered tasks with these consumers, in order per key.

    `start`, `options` and the rules for calls that fail (`backoff_s`, `attempt_limit`, `policy`, `time_limit_s`, …) are
    those of `App.consumer`; `options.concurrency` is how many bodies run at once, on threads of the process that hosts
    them. A call of a task that the application does not have waits, and its key with it, until a worker that has it
    takes over. An unordered group, and one with a tag filter, is refused with Conflict when they start.
    """
    # Said here, although these are a group's defaults: a group that somebody made unordered would run calls side by
    # side, and one with a filter would drop them all.
    register = consumers.consumer(
        topic, group=group, body=bytes, start=start, ordered=True, tag_filter="none", options=options, **rules
    )
    register(_TaskHandler(app))


class _TaskHandler:
    """The handler: from a message to the body, through Celery's tracer."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._loading = threading.Lock()
        self._tracers: dict[str, Callable[..., Any]] = {}
        self._hostname = socket.gethostname()

    def __call__(self, body: bytes, ctx: Context) -> None:
        call = decode(body)
        task = self._task(call.task)
        args, kwargs = arguments_of(call)
        run = TaskRun(ctx)
        request = as_request(call, args, kwargs) | {
            RUN: run,
            "called_directly": False,
            "hostname": self._hostname,
            "retries": ctx.attempt - 1,
            "delivery_info": {"topic": ctx.topic, "partition": ctx.partition, "offset": ctx.offset},
        }
        info: Any = None
        fault: BaseException | None = None
        try:
            info = self._tracer(task)(call.id, args, kwargs, request).info
        except Exception as error:
            # The result backend, or a receiver of a signal; the body decides all the same.
            if not run.finished and run.error is None:
                raise
            fault = error
        if run.error is not None:
            raise run.error
        if run.finished:
            _note_lost_result(call, fault or (info.retval if info is not None else None))
        elif info is not None:
            _judge(call, info)

    def _task(self, name: str) -> OrderedTask:
        task = self._app.tasks.get(name)
        if task is None:
            # A Celery worker has imported the application's modules before; `mqlayer consume` has not.
            with self._loading:
                self._app.loader.import_default_modules()
            task = self._app.tasks.get(name)
        if task is None:
            raise NotFound("ordered task", name, "this worker's application does not have it: its key waits")
        if not isinstance(task, OrderedTask):
            raise BodyMismatch(BODY, "it names a task that is not ordered")
        return task

    def _tracer(self, task: OrderedTask) -> Callable[..., Any]:
        tracer = self._tracers.get(task.name)
        if tracer is None:
            tracer = build_tracer(task.name, task, app=self._app, hostname=self._hostname)
            self._tracers[task.name] = tracer
        return tracer


def _retry_error(error: BaseException | None) -> Retry:
    """Return what tells Celery that the call will run again. Its text is logged: no text of the error's."""
    return Retry("its key waits" + (f": {where(error)}" if error is not None else ""), exc=error)


def _note_lost_result(call: TaskCall, error: BaseException | None) -> None:
    """The body is done: to repeat it would not bring its result back."""
    if error is not None:
        log.error("task_result_lost", extra={"task": call.task, "id": call.id, "error": where(error)})


def _judge(call: TaskCall, info: Any) -> None:
    """Decide about a body that neither returned nor failed: the task was ignored, or a hook failed."""
    if not isinstance(info.retval, Ignore):
        raise info.retval if isinstance(info.retval, BaseException) else HandlerFault(f"it ended as {info.state}")
    log.info("task_ignored", extra={"task": call.task, "id": call.id})


def _run_of(task: OrderedTask) -> TaskRun | None:
    run = getattr(task.request, RUN, None)
    return run if isinstance(run, TaskRun) else None
