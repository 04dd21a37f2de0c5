"""Which connections wait for an answer, by the kernel's tables."""

from pathlib import Path

from toolkit.nodes.agent import wire_protocol


def test_only_connections_that_the_kernel_has_tried_again_are_unanswered(tmp_path: Path) -> None:
    """The columns are those of x86-64. The rows: an established connection, a new one, and one sent three times."""
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    row = "   {}: 0100007F:9B52 {}:01BB {} 00000001:00000000 01:00000064 {} 0 0 1 2 0 100 0 0 10 -1\n"
    rows = [("0B4D000A", "01", "00000000"), ("0C4D000A", "02", "00000000"), ("0D4D000A", "02", "00000002")]
    (tmp_path / "tcp").write_text(head + "".join(row.format(number, *fields) for number, fields in enumerate(rows)))
    waiting = row.format(1, "B80D0120000000000000000001000000", "02", "00000001")
    (tmp_path / "tcp6").write_text(head + waiting)
    assert wire_protocol.unanswered(tmp_path) == {"10.0.77.13", "2001:db8::1"}


def test_without_the_kernels_tables_there_are_none(tmp_path: Path) -> None:
    assert wire_protocol.unanswered(tmp_path) == set()
