"""`vllm-commext` itself: its help, and the examples in it."""

import shlex

import pytest

from vllm_commext.cli import main, proxy


def test_without_a_command_the_help_names_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 2
    shown = capsys.readouterr().out
    assert all(f"\n    {command} " in shown for command in main.COMMANDS)


def test_the_examples_under_the_proxys_help_are_taken() -> None:
    lines = proxy.EPILOG.replace("\\\n", " ").splitlines()
    examples = [shlex.split(line)[1:] for line in lines if line.startswith("  vllm-commext")]
    assert len(examples) == 2
    for words in examples:
        args = main._build_parser(main.COMMANDS).parse_args(words)
        assert args.both or (args.prefill and args.decode)


def test_every_option_of_the_proxy_has_a_heading_and_says_what_it_is_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main.main(["proxy", "--help"])
    shown = capsys.readouterr().out
    general = shown.partition("\noptions:\n")[2].partition("\n\n")[0]
    assert general.split()[0] == "-h,"
    assert "--" not in general.replace("--help", "")
