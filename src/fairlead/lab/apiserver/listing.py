"""Lists: pages of objects as of one version.

In: the store and the options of a list. Out: the objects, their version, and a token for the next
page. Invariant: all pages of one list show the state at the version of the first page; if that
version is compacted, the next page is ApiFailure 410 and the client lists again. Follows
https://kubernetes.io/docs/reference/using-api/api-concepts/ (retrieving large result sets in
chunks).
"""

import base64
import binascii
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

import msgspec

from fairlead.kube.rules.causes import Object
from fairlead.lab.apiserver.failure import bad_request, expired, too_large
from fairlead.lab.apiserver.request import ListOptions, Target
from fairlead.lab.apiserver.selectors import Selection, parse_selection
from fairlead.lab.apiserver.store import Key, Store, Stored

_TOO_OLD: Final = (
    "The provided continue parameter is too old to display a consistent list result. You can "
    "start a new list without the "
    "continue parameter, or use the continue token in this response to retrieve the remainder of "
    "the results. Continuing "
    "with the provided token results in an inconsistent list - objects that were created, "
    "modified, or deleted between "
    "the time the first chunk was returned and now may show up in the list."
)


class Continue(msgspec.Struct):
    """The content of a continue token: the version of the list, and the key after which the page
    begins."""

    version: int
    after: tuple[str, str]


class Listed(msgspec.Struct, frozen=True):
    """One page. `metadata` is the list's: its version, continue token and number of remaining
    items."""

    items: Sequence[Stored]
    metadata: Object


def select(target: Target, options: ListOptions) -> Selection:
    return parse_selection(target.kind, options.labels, options.fields)


def in_scope(target: Target, selection: Selection, stored: Stored) -> bool:
    """Return whether a request for `target` includes this object."""
    if target.namespace and stored.key[0] != target.namespace:
        return False
    return selection.everything or selection.matches(stored.object)


def list_page(store: Store, target: Target, options: ListOptions) -> Listed:
    """Return the requested page. Raise ApiFailure for an invalid or expired version or token."""
    selection = select(target, options)
    token = _read_token(options.continue_token) if options.continue_token else None
    version = _version(store, options, token)
    if token is not None and version < store.compacted:
        raise expired(_TOO_OLD, _write_token(store.version, token.after))
    items = store.list_at(target.kind, version)
    if token is not None:
        items = items[bisect_right(items, token.after, key=lambda stored: stored.key) :]
    if target.namespace or not selection.everything:
        items = [stored for stored in items if in_scope(target, selection, stored)]
    metadata: Object = {"resourceVersion": str(version)}
    if options.limit and len(items) > options.limit:
        left = len(items) - options.limit
        items = items[: options.limit]
        metadata["continue"] = _write_token(version, items[-1].key)
        if selection.everything:
            metadata["remainingItemCount"] = left
    return Listed(items, metadata)


def _version(store: Store, options: ListOptions, token: Continue | None) -> int:
    if token is not None:
        if options.version:
            raise bad_request("specifying resource version is not allowed when using continue")
        return token.version
    if options.version is not None and options.version > store.version:
        raise too_large(options.version, store.version)
    if options.version_match == "Exact" and options.version:
        if options.version < store.compacted:
            raise expired(
                f"The resourceVersion for the provided list is too old: {options.version}"
            )
        return options.version
    return store.version


def _write_token(version: int, after: Key) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(Continue(version, after))).decode()


def _read_token(text: str) -> Continue:
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(text), type=Continue)
    except (binascii.Error, msgspec.DecodeError, ValueError) as error:
        raise bad_request("continue key is not valid") from error
