"""Host lists. The expected values are scontrol's (22.05.8); tests/slurm/test_hostlist_oracle.py asks it again."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.base.errors import RequestError
from toolkit.base.hostlist import compress, compress_counts, expand, expand_counts

EXPANSIONS = {
    "": "",
    "login": "login",
    "n[1,3-5,07]": "n1 n3 n4 n5 n07",
    "n[08-12]": "n08 n09 n10 n11 n12",
    "n[9-11]": "n9 n10 n11",
    "n[1-03]": "n1 n2 n3",
    "n[01-003]": "n01 n02 n03",
    "rack[1-2]node[01-03]": "rack1node01 rack1node02 rack1node03 rack2node01 rack2node02 rack2node03",
    "n[1-2]-[0-1]": "n1-0 n1-1 n2-0 n2-1",
    "n[1-2][3-4]x[5]": "n13x5 n23x5 n14x5 n24x5",
    "a[1-2]b[3-4]c[1-2]": "a1b3c1 a1b3c2 a2b3c1 a2b3c2 a1b4c1 a1b4c2 a2b4c1 a2b4c2",
    "[1-3]": "1 2 3",
    "b,a,a": "b a a",
    ",a,,b,": "a b",
    "a[1-2] b": "a1 a2 b",
    "n[1,1]": "n1 n1",
    "n[1-2]-ib,m": "n1-ib n2-ib m",
}

COMPRESSIONS = {
    "n3,n1,n2": "n[3,1-2]",
    "n1,n1,n2": "n[1,1-2]",
    "n01,n1,n2": "n[01,1-2]",
    "n9,n10,n11": "n[9-11]",
    "n09,n10,n11": "n[09-11]",
    "n98,n099,n100": "n[98,099-100]",
    "n010,n11,n9": "n[010,11,9]",
    "a1b1,a1b3,a3b1": "a1b[1,3],a3b1",
    "rack1node01,rack2node01,rack1node02": "rack1node01,rack2node01,rack1node02",
    "a1-ib,a2-ib": "a1-ib,a2-ib",
    "b,a,b": "b,a,b",
    "n1,x1,n2": "n1,x1,n2",
    "x,x1,x2": "x,x[1-2]",
    "1,2,3": "[1-3]",
    "-1,-2": "-[1-2]",
}


@pytest.mark.parametrize(("text", "hosts"), EXPANSIONS.items())
def test_expand_gives_what_scontrol_gives(text: str, hosts: str) -> None:
    assert expand(text) == hosts.split()


@pytest.mark.parametrize(("names", "text"), COMPRESSIONS.items())
def test_compress_gives_what_scontrol_gives(names: str, text: str) -> None:
    assert compress(names.split(",")) == text


@pytest.mark.parametrize(
    ("text", "position"),
    [("n[1", 2), ("n1]", 3), ("n[3-1]", 3), ("n[a]", 3), ("n[1,]", 5), ("n[]", 3), ("n[[1]]", 2), ("x,n[1-2,z]", 9)],
)
def test_a_typing_error_is_refused_with_its_position(text: str, position: int) -> None:
    with pytest.raises(RequestError, match=f"character {position}:") as caught:
        expand(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["a[0-9999][0-9999]", "n[1-999999999999]", "n[1-1000000],m[1]", "n[0-999999,5]"])
def test_a_list_that_would_eat_the_memory_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="more than"):
        expand(text)


@pytest.mark.parametrize("name", ["", "a b", "n[1-2]", "a,b"])
def test_compress_takes_plain_names_only(name: str) -> None:
    with pytest.raises(RequestError, match="not a host name"):
        compress(["a", name])


def test_counts_are_expanded_in_node_order() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert compress_counts([2, 2, 2, 1]) == "2(x3),1"
    assert expand_counts("16") == [16]
    assert expand_counts("") == []


@pytest.mark.parametrize("text", ["2(x)", "2,", "a", "2(3)", "-1", "2(x3),,1"])
def test_bad_counts_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="character"):
        expand_counts(text)


prefixes = st.sampled_from(["n", "rack1-", "a0b", "gpu-node", "x"])
numbers = st.builds(lambda number, width: str(number).zfill(width), st.integers(0, 200), st.integers(1, 4))
names = st.one_of(st.builds("{}{}".format, prefixes, numbers), st.sampled_from(["login", "a-ib"]))


@given(st.lists(names, max_size=30))
def test_compressing_and_expanding_changes_nothing(hosts: list[str]) -> None:
    assert expand(compress(hosts)) == hosts


@given(st.lists(st.integers(0, 99), max_size=30))
def test_counts_written_out_one_by_one_or_compressed_read_back(counts: list[int]) -> None:
    assert expand_counts(",".join(map(str, counts))) == expand_counts(compress_counts(counts)) == counts


def test_ten_thousand_nodes_take_milliseconds() -> None:
    def measure() -> float:
        started = time.process_time()
        assert len(expand("rack[1-100]node[001-100]")) == 10_000
        return time.process_time() - started

    assert min(measure() for _ in range(5)) < 0.02
