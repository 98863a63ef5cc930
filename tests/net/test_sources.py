"""The choice of the connection that is closed when there are too many, compared with a linear
search in a list."""

from hypothesis import given
from hypothesis import strategies as st

from fairlead.net.sources import ConnectionsBySource

STEPS = st.lists(
    st.tuples(
        st.sampled_from(("add", "remove", "touch")), st.sampled_from("abcd"), st.integers(0, 5)
    ),
    max_size=60,
)


@given(STEPS)
def test_the_connection_to_close_is_the_oldest_of_the_source_with_most_connections(
    steps: list[tuple[str, str, int]],
) -> None:
    connections = ConnectionsBySource[str]()
    used: list[tuple[str, str]] = []  # the connection that was used last is the last one
    for verb, source, number in steps:
        one = (source, f"{source}{number}")
        if verb == "add" and one not in used:
            connections.add(*one)
            used.append(one)
        elif verb == "remove" and one in used:
            connections.remove(*one)
            used.remove(one)
        elif verb == "touch" and one in used:
            connections.touch(*one)
            used.remove(one)
            used.append(one)
        counts = {each: [name for whose, name in used if whose == each] for each in "abcd"}
        assert {each: connections.count(each) for each in "abcd"} == {
            each: len(names) for each, names in counts.items()
        }
        most = max(map(len, counts.values()))
        assert connections.oldest_of_largest() in (
            [names[0] for names in counts.values() if len(names) == most] if most else [None]
        )
        assert all(connections.oldest(each) == names[0] for each, names in counts.items() if names)
