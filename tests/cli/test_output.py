from distman._cli.output import print_table


def test_a_table(capsys):
    print_table(["rank", "host"], [[0, "n1"], [10, "node2"]], title="ranks")
    assert capsys.readouterr().out == "ranks\nrank  host\n0     n1\n10    node2\n"


def test_a_table_without_rows(capsys):
    print_table(["rank", "host"], [])
    assert capsys.readouterr().out == "rank  host\n"
