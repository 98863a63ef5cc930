"""The values of annotations that are in force: a value that is not understood changes nothing.

In: a Service, and the `Values` of the annotations that are read of it. Out: the Service with the
values that are in force, and a Finding for each value that is not understood. The last value that
was understood stays in force, so a typing error does not switch off a PROXY header under traffic. A
Service of which nothing was understood yet is refused, which leaves it without an address. A blank
value, which a template writes whose variable is empty, is not understood either, unless the
annotation takes any text or a list: there it requests nothing, as if the annotation were absent.

Every role must find the same last value, also a gateway that has just started and has never seen
it. So it is in the object itself: the controller records the values in force in the annotation
`fairlead.io/understood`, in the write with which it claims the Service, before an address is
published. A claimed Service without a record had none of these annotations. A value that is
changed and then misspelled while no controller runs is not recorded: then the value before both
changes is in force. A user who writes the record requests nothing that the annotations themselves
could not request. Pure."""

from collections.abc import Iterable, Mapping

import msgspec

from fairlead.errors import Refused
from fairlead.kube.objects import Service
from fairlead.model import Finding
from fairlead.plan.annotation_reader import Values
from fairlead.plan.annotations import NOT_UNDERSTOOD, READ, RECORD, found, quoted
from fairlead.plan.service import claimed_class

_RECORD = msgspec.json.Decoder(dict[str, str])


def in_force(
    service: Service, table: Iterable[Values[object]]
) -> tuple[Service, tuple[Finding, ...]]:
    """Return the Service with the values that are in force, and a Finding for each annotation of
    the table that is not understood. Raise Refused if the Service is not claimed yet."""
    annotations = service.metadata.annotations
    if READ.isdisjoint(annotations):
        return service, ()  # nearly every Service
    wrong = []
    for values in table:
        name, text = found(annotations, values.names, blank=values.read("") is None)
        if name and values.read(text) is None:
            wrong.append((values, name, text))
    if not wrong:
        return service, ()
    if not claimed_class(service):
        raise Refused(
            "; ".join(values.problem(name, text) for values, name, text in wrong),
            fix="correct or remove the annotation",
        )
    former = _recorded(annotations)
    changed = dict(annotations)
    notes = []
    for values, name, text in wrong:
        for each in values.names:
            changed.pop(each, None)
        last = former.get(values.names[0], "")
        if last and values.read(last) is not None:
            changed[values.names[0]] = last
            what = f"the last value that was understood stays in force, {quoted(last)}"
        else:
            what = "the Service is served as before, without the annotation"
        notes.append(
            Finding(
                NOT_UNDERSTOOD,
                f"{values.problem(name, text)}; {what}",
                remedy="correct or remove the annotation",
            )
        )
    metadata = msgspec.structs.replace(service.metadata, annotations=changed)
    return msgspec.structs.replace(service, metadata=metadata), tuple(notes)


def record_of(service: Service, table: Iterable[Values[object]]) -> str:
    """Return the record of the values in force, or "" if there are none. Raise Refused if the
    Service is not claimed yet and has a value that is not understood."""
    table = tuple(table)
    annotations = in_force(service, table)[0].metadata.annotations
    values = {each.names[0]: text for each in table if (text := found(annotations, each.names)[1])}
    return msgspec.json.encode(values, order="sorted").decode() if values else ""


def _recorded(annotations: Mapping[str, str]) -> Mapping[str, str]:
    try:
        return _RECORD.decode(annotations.get(RECORD, "{}"))
    except msgspec.DecodeError:
        return {}
