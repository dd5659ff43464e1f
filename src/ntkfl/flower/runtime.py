"""Flower's runtime interface, as its own executors use it. With `superlink.py`, why Flower's version is pinned.

A SuperLink or SuperNode started with `--isolation process` hands its tasks to whoever asks with the shared secret. Its
usual executor (`flower-superexec`) starts a new process for every message and runs the program that came with the run:
whoever can start a run would run programs on every machine. Here the processes that ask are ours. They run what is
installed and nothing that came over the network, read their data once, and stay.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import httpx
from flwr.app import Context, Error, Message
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import context_from_proto, fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest, StopRunRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullAppMessagesRequest, PullTaskInputRequest
from flwr.serverapp import ServerApp
from flwr.supercore.constant import NodeStatus, TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, pull_and_inflate_object_from_tree
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

from ntkfl.errors import ConfigError, NTKFLError, Refused, TrustError
from ntkfl.flower.folders import SECRET
from ntkfl.flower.superlink import ControlToken

_ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})
_LOOK = 0.1  # seconds between two looks for a task
_STALLED = 2.0  # seconds without the next piece of a message
# What Flower wants to see of a run. The components are never loaded from it.
_APP = b"""[project]
name = "ntkfl-run"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "ntkfl"
[tool.flwr.app.components]
serverapp = "ntkfl.flower:installed"
clientapp = "ntkfl.flower:installed"
"""


class SuperLink:
    """A SuperLink at `address`, trusted by the authority in `ca`, whose executor secret is `secret`."""

    def __init__(self, address: str, ca: Path, secret: bytes) -> None:
        self.address, self.ca, self.secret = address, ca.read_bytes(), secret
        before: list[ProtobufClientInterceptor] = [
            RuntimeVersionHttpInterceptor(component_name="flwr CLI"),
            ControlToken(secret),
        ]
        self._control = ControlHttpClient.from_server_address(address, False, self.ca, before)

    def wait(self, seconds: float, alive: Callable[[], bool] = lambda: True) -> bool:
        """Until it answers; False where it is no longer `alive`, `Refused` after so many seconds."""
        until = time.monotonic() + seconds
        while True:
            try:
                with self._asking():
                    self._control.ListNodes(ListNodesRequest())
                return True
            except Refused:
                if not alive():
                    return False
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def admit(self, keys: Mapping[str, bytes]) -> dict[str, int]:
        """Node ids of the holders of these public keys (PEM), by name; those not known yet are registered."""
        with self._asking():
            listed = {info.public_key: info for info in self._control.ListNodes(ListNodesRequest()).nodes_info}
            gone = [n for n, key in keys.items() if key in listed and listed[key].status == NodeStatus.UNREGISTERED]
            if gone:
                raise ConfigError(
                    f"unregistered at the SuperLink: {', '.join(gone)}. It takes no key twice: start it again (with "
                    "--database: on a new file), or give the client a new key"
                )
            there = {key: int(info.node_id) for key, info in listed.items()}
            for name, key in keys.items():
                if key not in there:
                    asked = RegisterNodeRequest(public_key=key, name=name)
                    there[key] = int(self._control.RegisterNode(asked).node_id)
        return {name: there[key] for name, key in keys.items()}

    def run(self, app: ServerApp, note: Path) -> None:
        """Start a run and be its ServerApp, here. Its number is kept in `note`; the run whose number is there, killed
        perhaps, is stopped: Flower would wait for its heartbeat, and nodes for messages it never sent whole.
        """
        with suppress(OSError, ValueError, httpx.HTTPError):
            self._control.StopRun(StopRunRequest(run_id=int(note.read_text())))
        content, _ = build_fab_from_files({"pyproject.toml": _APP})
        fab = fab_to_proto(Fab(sha256(content).hexdigest(), content, {}))
        with self._asking():
            run_id = self._control.StartRun(StartRunRequest(fab=fab)).run_id
        note.write_text(str(run_id))
        with _acquired(self.address, self.ca, self.secret, TaskType.SERVER_APP, run_id) as token:
            grid = HttpGrid(self.address, root_certificates=self.ca, token=token)
            try:
                _serve(grid, app)
            finally:
                grid.close()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """One line where nobody answers there, or the one who does is not ours."""
        try:
            yield
        except (httpx.TransportError, ssl.SSLError) as error:
            line = f"no SuperLink answers at {self.address} ({error}); start one: ntkfl flower server DIR"
            raise Refused("unreachable", line) from None
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 401:
                raise
            line = f"the SuperLink at {self.address} does not take this folder's {SECRET}: is it another folder's?"
            raise TrustError(line) from None


def _serve(grid: HttpGrid, app: ServerApp) -> None:
    client = grid._runtime_client
    with _heartbeat(client):
        given = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
        TaskIdentity.node_id = given.context.node_id
        grid.set_run(run_from_proto(given.run))
        status, details = SubStatus.FAILED, "stopped"
        try:
            app(grid=grid, context=context_from_proto(given.context))
            status, details = SubStatus.COMPLETED, ""
        except Exception as error:
            details = type(error).__name__
            raise
        finally:
            push_task_output(client, None, status, details)


Answer = Callable[[Message, Context], Message]


def serve_node(
    address: str, secret: bytes, answer: Answer, alive: Callable[[], bool], said: Callable[[str], None]
) -> None:
    """Be the ClientApp of the SuperNode at `address` (on this machine) for as long as it is `alive`.

    An error of ours is the reply to what caused it; the next message may be sound.
    """
    tokens: list[str] = []

    def look() -> bool:
        """Whether there is a task to take."""
        with _client(address, None, secret=secret) as executor:
            found = executor.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])).token
        if found:
            tokens.append(found)
        return bool(tokens)

    while alive():
        try:
            if look():
                with _client(address, None, token=tokens.pop(0)) as client:
                    _answer_one(client, answer, said, lambda: look() or not alive())
            else:
                time.sleep(_LOOK)
        except httpx.ConnectError:  # it is about to start, or to end
            time.sleep(2 * _LOOK)
        except httpx.HTTPError as error:  # the run ended while it was answered
            said(f"the SuperNode: {error}")
            time.sleep(1)


def _answer_one(
    client: RuntimeHttpClient, answer: Answer, said: Callable[[str], None], given_up: Callable[[], bool]
) -> None:
    with _heartbeat(client):
        taken = _take(client, given_up)
        if taken is None:
            push_task_output(client, None, SubStatus.FAILED, "the message did not come")
            return
        message, context = taken
        status, details = SubStatus.COMPLETED, ""
        try:
            reply = answer(message, context)
        except Exception as error:  # whatever a message does to this client, the next may be sound
            reason = str(error) if isinstance(error, NTKFLError) else f"failed with {type(error).__name__}"
            said(f"not answered: {reason}")
            reply = Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)
            status, details = SubStatus.FAILED, reason
        push_message(client, reply, context)
        push_task_output(client, context, status, details)


def _take(client: RuntimeHttpClient, given_up: Callable[[], bool]) -> tuple[Message, Context] | None:
    """The task's message, once all of it is at the SuperNode; None if it never will be.

    A SuperNode makes the task before it has the message, and where the run ends in between it leaves the task behind.
    It works at one message at a time, so a newer task says that this one was given up.
    """
    given = client.PullTaskInput(PullTaskInputRequest())
    TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
    TaskIdentity.node_id = given.context.node_id
    context, node, tree = context_from_proto(given.context), Node(node_id=given.context.node_id), None
    while True:
        if tree is None:
            trees = client.PullMessages(PullAppMessagesRequest()).message_object_trees
            tree = trees[0] if trees else None
        if tree is not None:
            try:
                message = pull_and_inflate_object_from_tree(
                    tree,
                    make_pull_object_fn_protobuf(client.PullObject, node, context.run_id),
                    make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, context.run_id),
                    return_type=Message,
                    max_time=_STALLED,
                )
                message.metadata.__dict__["_message_id"] = tree.object_id
                return message, context
            except ObjectPullError:
                pass  # not all of it is there yet
        if given_up():
            return None
        time.sleep(_LOOK)


@contextmanager
def _acquired(address: str, ca: bytes, secret: bytes, kind: TaskType, run_id: int) -> Iterator[str]:
    """The token of the task of our run. Tasks of runs that others started are taken and left to expire."""
    with _client(address, ca, secret=secret) as executor:
        while True:
            found = executor.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
            if found.token and found.task.run_id == run_id:
                break
            if not found.token:
                time.sleep(_LOOK)
    yield found.token


@contextmanager
def _client(
    address: str, ca: bytes | None, *, secret: bytes | None = None, token: str | None = None
) -> Iterator[RuntimeHttpClient]:
    """A connection to a Runtime API: with TLS where there is an authority, else on this machine alone."""
    proof = (
        SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=_ACQUIRE)
        if secret is not None
        else RuntimeTokenHttpInterceptor(token or "")
    )
    name = "SuperExec" if secret is not None else "flwr-clientapp"
    client = RuntimeHttpClient.from_server_address(
        address,
        ca is None,
        ca,
        [RuntimeVersionHttpInterceptor(component_name=name), proof],
        retry_invoker=make_simple_http_retry_invoker() if token else None,
    )
    try:
        yield client
    finally:
        client.close()


@contextmanager
def _heartbeat(client: RuntimeHttpClient) -> Iterator[None]:
    """A task whose holder is silent for long is given up by Flower."""
    sender = HeartbeatSender(make_task_heartbeat_fn_http(client))
    sender.start()
    try:
        yield
    finally:
        if sender.is_running:
            sender.stop()
