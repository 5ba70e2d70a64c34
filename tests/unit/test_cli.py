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


ENGINES = ["--engine", "http://127.0.0.1:1"]
FIXED = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"]
MISTAKES: list[tuple[list[str], str, str]] = [
    (["--engine", "htp://a"], "--engine: ", "got 'htp://a'"),
    (["--engine", "http://a:1/v1"], "--engine: ", "leave out /v1"),
    (["--engine", "http://a:1/v1/"], "--engine: ", "leave out /v1"),
    (["--prefill", "http://a:1", "--decode", "http://b:1/v1"], "--decode: ", "leave out /v1"),
    ([*ENGINES, "--tpot-ms", "-5"], "--tpot-ms: ", "got -5; leave it out for 0"),
    ([*ENGINES, "--health-timeout", "0"], "--health-timeout: ", "got 0.0; leave it out for 5.0"),
    ([*ENGINES, "--drain-timeout", "nan"], "--drain-timeout: ", "got nan"),
    ([*ENGINES, "--port", "70000"], "--port: ", "got 70000"),
    ([*ENGINES, "--port", "http"], "--port: ", "expected a whole number, got 'http'"),
    ([*ENGINES, "--health-timeout", "soon"], "--health-timeout: ", "a number, got 'soon'"),
    ([*ENGINES, "--placement", "best"], "--placement: ", "got 'best'"),
    ([*ENGINES, "--ttft", "5"], "--ttft: ", "such as --ttft-ms"),
    ([*ENGINES, "--port"], "--port: ", "expected a value behind it, got none"),
    ([*ENGINES, "--ttft-ms", "1000"], "--ttft-ms: ", "add --tpot-ms"),
    ([*FIXED, "--tpot-ms", "15"], "--tpot-ms: ", "fixed roles; name engines by --engine"),
    ([*FIXED, "--ttft-ms", "1000"], "--ttft-ms: ", "fixed roles; name engines by --engine"),
    ([*ENGINES, "--placement", "local", "--tpot-ms", "15"], "--tpot-ms: ", "fixed roles"),
    (["--engines-file", "/no/such/file"], "/no/such/file: ", "No such file or directory"),
    ([*ENGINES, "--api-key-file", "/no/such/file"], "/no/such/file: ", "API keys"),
    ([*ENGINES, "--tls-cert-file", "/no/such/file"], "/no/such/file: ", "certificate"),
    ([*ENGINES, "--admin-port", "0"], "", "--admin-token-file FILE"),
    ([], "no prefill engine given", "--engine"),
    ([*ENGINES, "http://h:1"], "http://h:1: ", "got a value without its option"),
]


def test_an_option_of_vllm_serve_is_sent_behind_two_dashes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main.main(["serve", "model", "--max-model-len", "4096"])
    assert "of this command, or one of vllm serve after ' -- ', got" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "beginning", "part"), MISTAKES)
def test_a_mistake_gets_one_sentence_and_status_2_before_anything_starts(
    capsys: pytest.CaptureFixture[str], words: list[str], beginning: str, part: str
) -> None:
    try:
        status = main.main(["proxy", *words])
    except SystemExit as end:
        status = end.code
    shown = capsys.readouterr()
    assert (status, shown.out) == (2, "")
    (line,) = shown.err.splitlines()
    assert line.startswith(f"vllm-commext proxy: {beginning}")
    assert part in line
    assert "_" not in line
