"""`hybridflow verify` and `bench` on the command line: exit codes, and what is listed."""

import pytest

from hybridflow.cli import main


def test_one_rank_is_verified_and_counted(capsys: pytest.CaptureFixture[str]):
    assert main(["verify", "--world", "1", "--only", "zb-h1 - rows3 zero0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 3 and lines[-2].startswith(f"{len(lines) - 3} of {len(lines) - 3} combinations give")


def test_what_is_listed_is_what_would_run(capsys: pytest.CaptureFixture[str]):
    assert main(["verify", "--list", "--only", "zb-v"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed and all("zb-v" in line for line in listed)


@pytest.mark.parametrize("argv", [["verify", "--world", "0"], ["verify", "--world", "x"], ["verify", "config.yaml"],
                                  ["bench"], ["bench", "nothing"]])
def test_a_wrong_command_line_ends_with_2(argv: list[str]):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2


def test_a_text_that_is_in_no_combination_ends_with_2(capsys: pytest.CaptureFixture[str]):
    assert main(["verify", "--only", "tp3"]) == 2
    assert "--list" in capsys.readouterr().err
