"""Celery tasks whose calls run in order per key: docs/how-to/ordered-tasks.md.

A broker keeps no order per key, so a call is a message of a topic. Members of a group run it inside Celery's tracer,
with results, signals and hooks. Celery sees a failed attempt as a retry.

States: ARCHITECTURE.md; crashes: docs/design/crash-matrix.md. A worker that wakes may store its result late; its
acknowledgement and fenced effects are refused.
"""

from __future__ import annotations

import inspect
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
from mqlayer.consuming.engine.timeouts import HandlerInterrupt, timed_out
from mqlayer.domain.names import check_name
from mqlayer.errors import BodyMismatch, FenceError, HandlerFault, InvalidInput, NotFound
from mqlayer.failpoints import failpoint
from mqlayer.groups.group import RetrySettings
from mqlayer.groups.start_positions import Start
from mqlayer.logs import event_logger
from mqlayer.outbox import publish
from mqlayer.runtime.error_text import where
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

log = event_logger(__name__)

TOPIC: Final = "tasks"
GROUP: Final = "tasks"
RUN: Final = "mqlayer_run"


@dataclass(slots=True)
class TaskRun:
    """One run of a body."""

    context: Context
    begun: bool = False
    finished: bool = False
    error: BaseException | None = None


class OrderedTask(Task):
    """A task whose calls run in order per key; `ordered_task` makes it."""

    abstract = True
    key: Key = ""
    topic: str = TOPIC

    def __init_subclass__(cls, **options: Any) -> None:
        # Celery makes a class of each task, so this checks the decorator's options.
        super().__init_subclass__(**options)
        if inspect.isfunction(cls.__dict__.get("key")):
            # Else it becomes a method.
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
        """Publish a call behind earlier ones of its key and thread; return its AsyncResult once stored.

        Raises PublishError, StoreUnavailable; InvalidInput for refused options, an invalid key or non-JSON arguments;
        TypeError for unfit arguments.
        """
        return self._call(None, args, kwargs, task_id, options)

    def delay_in(self, connection: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the task in the caller's transaction: it runs only if that commits.

        `connection` and errors: `mqlayer.outbox.publish`. Calls of a key run in commit order, apart from those by
        `delay`.
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
        """Like `delay_in`, with options."""
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
        """Refused: bodies would run without order."""
        raise InvalidInput(f"ordered task {self.name!r}: call it once for each item")

    def starmap(self, *_: Any) -> NoReturn:
        """Refused, like `map`."""
        self.map()

    def chunks(self, *_: Any) -> NoReturn:
        """Refused, like `map`."""
        self.map()

    # -- in the body -------------------------------------------------------------------------------------------------

    @property
    def message(self) -> Context | None:
        """The current message's Context; None in a direct or eager call."""
        run = _run_of(self)
        return run.context if run is not None else None

    def fence(self, connection: Any) -> None:
        """Let this transaction's effects happen once, by the current owner only (`Context.fence`).

        Call it first in the transaction; let its errors pass. Without a message it does nothing.
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
        """Fail this attempt: the group retries the message after its backoff, and its key waits.

        Always raises; ignores `eta`, `countdown` and `max_retries`. New arguments or options are InvalidInput. Without
        a message, Celery's retry.
        """
        if _run_of(self) is None:
            return super().retry(args, kwargs, exc, throw, eta, countdown, max_retries, **options)
        if args is not None or kwargs is not None or options:
            raise InvalidInput(f"ordered task {self.name!r}: a retry keeps its arguments and takes no options")
        cause = exc or sys.exc_info()[1]
        raise _retry_error(cause) from cause

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body."""
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
            # Not for Celery: the effect exists, or the next owner makes it.
            run.error = error
            raise Ignore from error
        except Retry as asked:
            run.error = asked.exc if isinstance(asked.exc, BaseException) else asked
            raise
        except HandlerInterrupt as end:
            # Celery must see an ordinary error.
            run.error = timed_out(end)
            raise _retry_error(run.error) from end
        except Exception as error:
            run.error = error
            raise _retry_error(error) from error
        run.finished = True
        return answer

    def _pass_on(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
        # A broker brought this call (`send_task`, old messages): it goes behind earlier calls of its key.
        request = self.request
        options = {"headers": request.headers, "root_id": request.root_id, "parent_id": request.parent_id}
        self._call(None, args, kwargs, request.id, options | {"add_to_parent": False})
        raise Ignore


def ordered_task(
    app: Celery | None = None, *, key: Key, topic: str = TOPIC, **options: Any
) -> Callable[[Callable[..., Any]], Any]:
    """Make a function a task whose calls run in order per key; without `app`, a shared task.

    `key`: a parameter's name, or a function of the arguments that returns text, a whole number or a UUID. `topic` must
    exist. `options`: as of `app.task`; InvalidInput for ineffective ones.
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
    """Run the calls of an application's ordered tasks.

    `start`, `options`, `rules`: as of `App.consumer`; `options.concurrency` bodies run at once, on threads. A call of
    an unknown task waits, with its key, for a worker that has it. Starting raises Conflict for a group without order,
    or with a tag filter.
    """
    # Explicit, though defaults: an unordered group would run a key's calls side by side, a tag filter would drop all.
    register = consumers.consumer(
        topic, group=group, body=bytes, start=start, ordered=True, tag_filter="none", options=options, **rules
    )
    register(_TaskHandler(app))


class _TaskHandler:
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
            # The result backend or a signal's receiver failed; the body still decides.
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
            # Unlike a Celery worker, `mqlayer consume` has not imported the application's modules.
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
    # Celery logs this text: it must not quote the error.
    return Retry("its key waits" + (f": {where(error)}" if error is not None else ""), exc=error)


def _note_lost_result(call: TaskCall, error: BaseException | None) -> None:
    # The body is done: repeating it would not restore its result.
    if error is not None:
        log.error("task_result_lost", extra={"task": call.task, "id": call.id, "error": where(error)})


def _judge(call: TaskCall, info: Any) -> None:
    # The body neither returned nor failed: the task was ignored, or a hook failed.
    if not isinstance(info.retval, Ignore):
        raise info.retval if isinstance(info.retval, BaseException) else HandlerFault(f"it ended as {info.state}")
    log.info("task_ignored", extra={"task": call.task, "id": call.id})


def _run_of(task: OrderedTask) -> TaskRun | None:
    run = getattr(task.request, RUN, None)
    return run if isinstance(run, TaskRun) else None
