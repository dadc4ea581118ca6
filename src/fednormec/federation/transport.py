"""Server's end of Flower: the Fleet API of a SuperLink, with TLS and node authentication, and a Grid on it.

A whole SuperLink of flwr 1.41 serves its Control and Runtime APIs on the same port, and whoever reaches that may
register keys and start code. Here there is the Fleet API alone, less the paths that register nodes and hand out code:
who takes part is the roster's affair, and what a client runs is what is installed on its machine.
"""

import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any, NamedTuple

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from flwr.app import Message, MessageType, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_INTERVAL_INF, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    DeactivateNodeRequest,
    DeactivateNodeResponse,
    PullMessagesRequest,
)
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.serverapp import Grid
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID, TaskType
from flwr.supercore.error import ApiErrorCode, FlowerError, http_error_translator
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.protobuf.routing import ProtobufRoute
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_DEPENDENCY, ProtobufTranslationMiddleware
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware
from flwr.superlink.routers.fleet.router import router
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint

from fednormec.errors import UserError

OPEN = {f"/v1/fleet/{name}" for name in (
    "activate-node", "deactivate-node", "pull-messages", "push-messages", "pull-object", "push-object",
    "confirm-message-received",
)}  # fmt: skip
ACTIVATE, DEACTIVATE = "/v1/fleet/activate-node", "/v1/fleet/deactivate-node"
ENVELOPE = 2**16  # bytes of a message besides its vectors, at the very most
SILENCE = 15.0  # seconds without a sign of a client, which asks for work every few of them, after which it is gone
PAUSE = 0.02
LIFE = 86_400.0  # seconds that Flower keeps a message for; a round's own deadline comes first
Dispatch = Callable[[Request, RequestResponseEndpoint], Awaitable[Response]]


class Listen(NamedTuple):
    """Address where the server listens, and the files of its key and certificate (none: without TLS)."""

    host: str
    port: int
    key: str | None = None
    certificate: str | None = None


class Link:
    """Connections of the clients as the server knows them: their nodes, when each was last heard of, and who is new."""

    def __init__(self, public_keys: Sequence[bytes]) -> None:
        objects = ObjectStoreFactory(FLWR_IN_MEMORY_DB_NAME)
        self.factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), objects)
        self.state: Any = self.factory.state()
        self.nodes = [self.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0) for key in public_keys]
        self._seen: dict[int, float] = {}
        self._joined: set[int] = set()
        self._lock = threading.Lock()

    def activate(self, public_key: bytes) -> int:
        """Gives a client with a known key its place, also after a restart; returns its node."""
        node = self.state.get_node_id_by_public_key(public_key)
        if node is None:
            raise FlowerError(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED, "this key is not on the roster")
        self.state.deactivate_node(node)
        self.state.activate_node(node, HEARTBEAT_INTERVAL_INF)  # whether it is there, its requests tell
        with self._lock:
            self._joined.add(node)
        self.see(node)
        return int(node)

    def see(self, node: int) -> None:
        """Notes that a node was heard of."""
        with self._lock:
            self._seen[node] = time.monotonic()

    def leave(self, node: int) -> None:
        """Counts a node as gone; messages can still wait for it."""
        with self._lock:
            self._seen.pop(node, None)

    def here(self) -> set[int]:
        """Returns the nodes that were heard of a short while ago."""
        with self._lock:
            return {node for node, at in self._seen.items() if time.monotonic() - at < SILENCE}

    def newly_joined(self) -> set[int]:
        """Returns the nodes that connected since this was last asked: they know nothing of requests from before."""
        with self._lock:
            joined, self._joined = self._joined, set()
            return joined

    @contextmanager
    def grid(self) -> Iterator["LinkGrid"]:
        """Opens a grid for one training."""
        run_id = self.state.create_run(
            None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        (run,) = self.state.get_run_info(run_ids=[run_id])
        task = run.primary_task_id
        self.state.claim_task(task)
        self.state.activate_task(task)
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, SUPERLINK_NODE_ID, task
        heart = HeartbeatSender(lambda: bool(self.state.acknowledge_task_heartbeat(task)))
        heart.start()
        try:
            yield LinkGrid(self.state, run)
        finally:
            heart.stop()


class LinkGrid(Grid):
    """Grid of Flower right on the state behind the Fleet API: no second connection, no token."""

    def __init__(self, state: Any, run: Run) -> None:
        self._state, self._run = state, run
        self._requests: dict[str, Message] = {}
        self._incomplete: dict[str, Message] = {}  # replies whose vectors are still on the way

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        (run,) = self._state.get_run_info(run_ids=[self._run.run_id])
        return run  # type: ignore[no-any-return]

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return self._state.get_nodes(self._run.run_id)  # type: ignore[no-any-return]

    def get_nodes(self) -> Any:
        return self._state.get_node_info(node_ids=list(self.get_node_ids()))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Returns the ids under which the messages now wait for their nodes, "" for one that cannot."""
        return [self._push(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Returns the replies that are there in full. One that cannot be read comes with an empty content."""
        for reply in self._state.get_message_res(message_ids=set(message_ids), run_id=self._run.run_id):
            self._incomplete[reply.metadata.reply_to_message_id] = reply
        replies = []
        for key, reply in list(self._incomplete.items()):
            content = self._content(reply)
            if content is not None:
                reply.__dict__.update(_content=content, _error=None)
                replies.append(reply)
                self.forget([key])
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Sends messages and returns their replies, for all that need no more than that."""
        waiting, end = set(self.push_messages(messages)) - {""}, time.monotonic() + (timeout or 0.0)
        replies: list[Message] = []
        while waiting and (timeout is None or time.monotonic() < end):
            replies += self.pull_messages(waiting)
            waiting -= {reply.metadata.reply_to_message_id for reply in replies}
            time.sleep(0.02)
        self.forget(waiting)
        return replies

    def forget(self, message_ids: Iterable[str]) -> None:
        """Drops requests that nobody need answer any more, and what has come of their replies."""
        for message_id in list(message_ids):
            self._requests.pop(message_id, None)
            self._state.delete_messages(message_ins_ids={message_id})
            self._state.object_store.delete(message_id)
            reply = self._incomplete.pop(message_id, None)
            if reply is not None:
                self._state.object_store.delete(reply.metadata.message_id)

    def was_fetched(self, message_id: str) -> bool:
        """Returns whether the client has taken a request to work on it."""
        return bool(self._requests[message_id].metadata.delivered_at)

    def _push(self, message: Message) -> str:
        with no_object_id_recompute():
            message.metadata.__dict__["_message_id"] = message.object_id
            tree, bare = get_object_tree(message), remove_content_from_message(message)
            session = self._state.start_session(self._run.run_id)
            stored, missing = self._state.store_message_and_object_tree(bare, tree, session)
            if not stored:
                return ""
            for object_id, item in get_all_nested_objects(message).items():
                if object_id in set(missing):
                    self._state.store_object(self._run.run_id, session, object_id, item.deflate())
        self._requests[bare.metadata.message_id] = bare
        return str(bare.metadata.message_id)

    def _content(self, reply: Message) -> RecordDict | None:
        """Returns what a reply says, an empty record if it cannot be read; None as long as parts of it are missing."""
        key, store = reply.metadata.message_id, self._state.object_store
        try:
            ids = [tree.object_id for tree in iterate_object_tree(store.get_object_tree(key))]
            contents = {object_id: self._state.get_object(self._run.run_id, object_id) for object_id in ids}
            if any(content == b"" for content in contents.values()):
                return None
            whole = inflate_object_from_contents(key, contents)
        except Exception:  # whatever Flower's decoders raise: not what a message is made of
            return RecordDict()
        return whole.content if isinstance(whole, Message) and whole.has_content() else RecordDict()


def asked(
    link: Link, grid: LinkGrid, contents: Mapping[int, RecordDict], deadline: float, kind: str = MessageType.TRAIN
) -> dict[int, Message]:
    """Asks clients by their number and returns the answers that came in time.

    Nobody waits for a client that is gone: neither for one that was not heard of for a while and has not fetched its
    request, nor after the deadline for any. One that connects anew meanwhile is asked again.
    """
    end, waiting, answers = time.monotonic() + deadline, dict[str, int](), dict[int, Message]()
    numbers = {node: client for client, node in enumerate(link.nodes)}
    link.newly_joined()  # whoever did so before is asked now anyway
    new = set(contents)
    while True:
        unfetched = {client for key, client in waiting.items() if not grid.was_fetched(key)}
        for client in sorted(new & set(contents) - set(answers) - unfetched):
            (key,) = grid.push_messages([Message(contents[client], link.nodes[client], kind, ttl=LIFE)])
            if key:  # no message can wait for a client that never connected
                waiting[key] = client
        for reply in grid.pull_messages(waiting):
            client = waiting.pop(reply.metadata.reply_to_message_id)
            answers.setdefault(client, reply)
        missing, here = {key: client for key, client in waiting.items() if client not in answers}, link.here()
        expected = [key for key, client in missing.items() if link.nodes[client] in here or grid.was_fetched(key)]
        if not expected or time.monotonic() > end:
            break
        time.sleep(PAUSE)
        new = {numbers[node] for node in link.newly_joined()}
    grid.forget(waiting)
    return answers


@contextmanager
def listening(link: Link, where: Listen, vectors: int) -> Iterator[None]:
    """Serves the Fleet API in a thread of its own, until the context ends.

    A request is no longer than twice `vectors` bytes, and a little.
    """
    config = uvicorn.Config(
        fleet(link, 2 * vectors + ENVELOPE), host=where.host, port=where.port, ssl_keyfile=where.key,
        ssl_certfile=where.certificate, log_level="critical", access_log=False, lifespan="off", ws="none",
        timeout_graceful_shutdown=2,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=_quietly(server), name="fleet", daemon=True)
    thread.start()
    while thread.is_alive() and not server.started:
        time.sleep(PAUSE)
    if not server.started:
        raise UserError(f"nothing can listen on {where.host}:{where.port}: is the port in use, or not yours to use?")
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(timeout=5)


def fleet(link: Link, most: int) -> FastAPI:
    """Returns the Fleet API for the clients on the roster, and nothing else."""
    app = FastAPI(
        docs_url=None, redoc_url=None, openapi_url=None,
        middleware=[
            Middleware(BaseHTTPMiddleware, dispatch=_gate(most)),
            Middleware(BaseHTTPMiddleware, dispatch=http_error_translator),
            Middleware(ProtobufTranslationMiddleware),
            Middleware(NodeAuthMiddleware),
            Middleware(BaseHTTPMiddleware, dispatch=_watch(link)),
        ],
    )  # fmt: skip
    app.state.linkstate_factory, app.state.enable_supernode_auth = link.factory, True
    own = APIRouter(route_class=ProtobufRoute)

    @own.post(ACTIVATE)
    def activate(request: Annotated[ActivateNodeRequest, PROTOBUF_REQUEST_DEPENDENCY]) -> ActivateNodeResponse:
        return ActivateNodeResponse(node_id=link.activate(request.public_key))

    @own.post(DEACTIVATE)
    def deactivate(request: Annotated[DeactivateNodeRequest, PROTOBUF_REQUEST_DEPENDENCY]) -> DeactivateNodeResponse:
        link.leave(request.node_id)
        return DeactivateNodeResponse()

    app.include_router(own)  # before Flower's, which refuses a client that was killed and is back
    app.include_router(router)
    return app


def _gate(most: int) -> Dispatch:
    """Lets only pass what a client needs, and no more than `most` bytes of it."""

    async def dispatch(request: Request, call_next: RequestResponseEndpoint) -> Response:
        if request.url.path not in OPEN:
            return PlainTextResponse("not found", 404)
        length = request.headers.get("content-length", "")
        if not (length.isascii() and length.isdecimal() and int(length) <= most):
            return PlainTextResponse("too long, or of unknown length", 413)
        return await call_next(request)

    return dispatch


def _watch(link: Link) -> Dispatch:
    """Notes that a client that asks for work is there. Its key was checked before."""

    async def dispatch(request: Request, call_next: RequestResponseEndpoint) -> Response:
        asked_for = getattr(request.state, "protobuf_request", None)
        if isinstance(asked_for, PullMessagesRequest):
            link.see(asked_for.node.node_id)
        return await call_next(request)

    return dispatch


def _quietly(server: uvicorn.Server) -> Callable[[], None]:
    def run() -> None:
        with suppress(SystemExit):  # uvicorn's way to say that it cannot listen
            server.run()

    return run
