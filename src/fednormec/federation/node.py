"""Client's end of Flower: it connects out, proves who it is, fetches requests and hands in answers.

It runs the app that it is given, from this machine. A SuperNode of flwr would fetch code from the server and run that:
then it would be the server that decides whether noise is added here.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import httpx
from flwr.app import Context, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.clientapp import ClientApp
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
)
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fednormec.errors import UserError
from fednormec.federation.keys import Private

SHORTEST, LONGEST = 0.05, 3.0  # seconds between two looks for work: more and more, until there is some


class Server(NamedTuple):
    """Address of the server, and the certificate of the authority that vouches for it (None: without TLS)."""

    address: str
    authority: bytes | None


def take_part(
    server: Server, key: Private, app: ClientApp, over: Callable[[], bool], stop: Callable[[], bool],
    tell: Callable[[str], None],
) -> None:  # fmt: skip
    """Answers what the server asks until the training is `over`, or somebody wants to `stop`.

    A server that is not there is waited for; one that was restarted is joined again.
    """
    told = False
    while not (over() or stop()):
        try:
            with _connection(server, key) as client:
                node = _joined(client, public_key_to_bytes(key.public_key()))
                tell(f"connected to {server.address}")
                told = False
                _work(client, node, app, lambda: over() or stop())
        except httpx.TransportError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise UserError(f"{server.address} does not prove that it is the federation's server: {error}. Is "
                                "ca.crt that of this federation, and the address one that its certificate names?"
                                ) from error  # fmt: skip
            if not told:
                tell(f"{server.address} does not answer; it is tried again and again")
            told = True
            time.sleep(1.0)
        except httpx.HTTPStatusError as error:  # a server that was restarted knows its clients by other numbers
            if error.response.status_code != httpx.codes.UNAUTHORIZED and not told:
                tell(f"{server.address} says {error.response.status_code}; it is tried again and again")
                told = True
            time.sleep(1.0)


def _connection(server: Server, key: Private) -> FleetHttpClient:
    signing = NodeAuthHttpInterceptor(key, key.public_key())
    return FleetHttpClient.from_server_address(
        server.address,
        server.authority is None,
        server.authority,
        [RuntimeVersionHttpInterceptor(component_name="SuperNode"), signing],
    )


def _joined(client: FleetHttpClient, public_key: bytes) -> Node:
    try:
        found = client.ActivateNode(
            ActivateNodeRequest(public_key=public_key, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        )
    except httpx.HTTPStatusError as error:
        if error.response.status_code >= 500:
            raise
        raise UserError("the server does not know this key: its operator must put the public key, node.pub, on the "
                        "roster (fednormec federation add). Or the clocks of both machines are minutes apart."
                        ) from error  # fmt: skip
    return Node(node_id=found.node_id)


def _work(client: FleetHttpClient, node: Node, app: ClientApp, done: Callable[[], bool]) -> None:
    pause, context = SHORTEST, Context(0, node.node_id, {}, RecordDict(), {})
    while not done():
        found: PullMessagesResponse = client.PullMessages(PullMessagesRequest(node=node))
        if not found.messages_list:
            time.sleep(pause)
            pause = min(LONGEST, 1.2 * pause)
            continue
        pause = SHORTEST
        run = message_from_proto(found.messages_list[0]).metadata.run_id
        with suppress(ObjectPullError, ObjectPushError):  # withdrawn meanwhile: the round is over
            message = _fetched(client, node, run, found.message_object_trees[0])
            _hand_in(client, node, run, app(message, context))
    with suppress(httpx.HTTPError):
        client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))


def _fetched(client: FleetHttpClient, node: Node, run: int, tree: ObjectTree) -> Message:
    message = pull_and_inflate_object_from_tree(
        tree,
        make_pull_object_fn_protobuf(client.PullObject, node, run),
        make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, run),
        return_type=Message,
    )
    message.metadata.__dict__["_message_id"] = tree.object_id
    return message


def _hand_in(client: FleetHttpClient, node: Node, run: int, reply: Message) -> None:
    reply.metadata.__dict__["_message_id"] = reply.object_id
    with no_object_id_recompute():
        accepted = client.PushMessages(
            PushMessagesRequest(
                node=node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[0.0],
            )
        )
        push_objects(
            get_all_nested_objects(reply),
            make_push_object_fn_protobuf(client.PushObject, node, run, accepted.session_id),
            object_ids_to_push=set(accepted.objects_to_push),
        )
