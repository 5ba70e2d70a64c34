"""A text for each tool and reasoning parser of vLLM, as its models write calls and reasoning."""

import json
from collections.abc import Callable, Iterable
from typing import Any

Call = tuple[str, dict[str, Any]]
Write = Callable[[Iterable[Call]], str]
ALIKE, VARIED = "two calls alike", "no and nested arguments"
CALLS: dict[str, list[Call]] = {
    ALIKE: [("weather", {"city": "Tokyo", "days": 2}), ("weather", {"city": "Tokyo", "days": 2})],
    VARIED: [("clock", {}), ("search", {"where": {"a": [1, {"b": "x"}]}, "tags": ["y, z", "}"]})],
}
_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}
_PROPERTIES: dict[str, dict[str, Any]] = {
    "weather": {"city": _STRING, "days": _INTEGER},
    "clock": {},
    "search": {"where": {"type": "object"}, "tags": {"type": "array", "items": _STRING}},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }
    for name, properties in _PROPERTIES.items()
]
REASONING, CONTENT = 'It is said,\nso I look <up> "it".', "Let me see: 1 < 2.\n"


def _json(
    before: str = "",
    after: str = "",
    between: str = "",
    opening: str = "",
    closing: str = "",
    arguments: str = "arguments",
) -> Write:
    def write(calls: Iterable[Call]) -> str:
        told = (json.dumps({"name": name, arguments: args}) for name, args in calls)
        return opening + between.join(f"{before}{one}{after}" for one in told) + closing

    return write


def _tags(call: str, argument: str, opening: str = "", closing: str = "", **kinds: str) -> Write:
    """With ``{name}``, ``{arguments}``, ``{number}`` in *call*; ``{key}``, ``{value}``, ``{kind}``
    in *argument*, where strings stand as they are; kinds: by JSON's, how a value stands there."""

    def value(kind: str, one: Any) -> str:
        text = one if isinstance(one, str) else json.dumps(one)
        return kinds.get(kind, "{}").replace("{}", text)

    def write(calls: Iterable[Call]) -> str:
        told = opening
        for number, (name, args) in enumerate(calls):
            inner = ""
            for key, one in args.items():
                kind = _PROPERTIES[name][key]["type"]
                inner += _filled(argument, key=key, value=value(kind, one), kind=kind)
            told += _filled(call, name=name, number=str(number), arguments=inner)
        return told + closing

    return write


def _filled(form: str, **values: str) -> str:
    for name, value in values.items():
        form = form.replace("{" + name + "}", value)
    return form


def _each(call: str, opening: str = "", closing: str = "", between: str = "") -> Write:
    """With ``{name}``, ``{number}`` and ``{json}``, the arguments."""

    def write(calls: Iterable[Call]) -> str:
        told = (
            _filled(call, name=name, number=str(number), json=json.dumps(args))
            for number, (name, args) in enumerate(calls)
        )
        return opening + between.join(told) + closing

    return write


def _python(opening: str, closing: str, between: str = ", ") -> Write:
    def write(calls: Iterable[Call]) -> str:
        told = (
            f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})"
            for name, args in calls
        )
        return opening + between.join(told) + closing

    return write


def _dsml(outer: str, space: str = "") -> Write:
    mark = f"｜DSML｜{space}"
    return _tags(
        f'<{mark}invoke name="{{name}}">\n{{arguments}}</{mark}invoke>\n',
        f'<{mark}parameter name="{{key}}" string="false">{{value}}</{mark}parameter>\n',
        f"<{mark}{outer}>\n",
        f"</{mark}{outer}>",
        string='"{}"',
    )


def _minimax(calls: Iterable[Call]) -> str:
    mark = "]<]minimax[>["

    def element(name: str, value: Any) -> str:
        if isinstance(value, dict):
            inner = "".join(element(key, one) for key, one in value.items())
        elif isinstance(value, list):
            inner = "".join(element("item", one) for one in value)
        else:
            inner = str(value)
        return f"{mark}<{name}>{inner}{mark}</{name}>"

    told = "".join(
        f'{mark}<invoke name="{name}">{"".join(element(*one) for one in args.items())}'
        f"{mark}</invoke>"
        for name, args in calls
    )
    return f"{mark}<tool_call>{told}{mark}</tool_call>"


_ARG = "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
_GLM = _tags("<tool_call>{name}\n{arguments}</tool_call>\n", _ARG)
_QWEN = _tags(
    "<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>\n",
    "<parameter={key}>\n{value}\n</parameter>\n",
)
_MUSE = _tags(
    "<|start|>assistant to={name}<|message|><atem:function_calls>\n"
    '<atem:invoke name="{name}">\n{arguments}</atem:invoke>\n</atem:function_calls><|eom|>',
    '<atem:parameter name="{key}">{value}</atem:parameter>\n',
)
_HERMES = _json("<tool_call>\n", "\n</tool_call>\n")
_K2 = "ifm|"
TOOL_TEXTS: dict[str, Write] = {
    "beam": _HERMES,
    "hf": _HERMES,
    "apertus": lambda calls: (
        "<|tools_prefix|>" + json.dumps([{name: args} for name, args in calls]) + "<|tools_suffix|>"
    ),
    "deepseek_v3": _each(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "\n",
    ),
    "deepseek_v31": _each(
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml("calls", " "),
    "dots": _tags(
        "<dots_function_call>\n<invoke name={name}>\n{arguments}</invoke>\n</dots_function_call>\n",
        "<parameter name={key}>{value}</parameter>\n",
    ),
    "ernie45": _HERMES,
    "functiongemma": _tags(
        "<start_function_call>call:{name}{{arguments}}<end_function_call>",
        "{key}:<escape>{value}<escape>,",
    ),
    "gemma4": _tags(
        "<|tool_call>call:{name}{{arguments}}<tool_call|>", "{key}:{value},", string='<|"|>{}<|"|>'
    ),
    "gigachat3": _json("<|function_call|>"),
    "glm45": _GLM,
    "glm47": _GLM,
    "granite": _json(between=", ", opening="<|tool_call|>[", closing="]"),
    "granite-20b-fc": _json("<function_call> ", between="\n"),
    "granite4": _HERMES,
    "hermes": _HERMES,
    "qwen3_json": _HERMES,
    "hunyuan_a13b": _json(between=", ", opening="<tool_calls>[", closing="]</tool_calls>"),
    "hy_v3": _tags(
        "<tool_call>{name}<tool_sep>\n{arguments}</tool_call>\n",
        _ARG,
        "<tool_calls>\n",
        "</tool_calls>",
    ),
    "hy_v4": _tags(
        "<tool_call>{name}{arguments}</tool_call>",
        "<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
        "<tool_calls>",
        "</tool_calls>",
    ),
    "inkling": _json(
        "<|message_model|><|content_invoke_tool_json|>", "<|end_message|>", arguments="args"
    ),
    "internlm": _json("<|action_start|><|plugin|>\n", "<|action_end|>", arguments="parameters"),
    "jamba": _json(between=",\n", opening="<tool_calls>[\n", closing="\n]</tool_calls>"),
    "k2_horizon": _tags(
        f"<{_K2}tool_call>{{name}}\n{{arguments}}</{_K2}tool_call>\n",
        f"<{_K2}arg_key>{{key}}</{_K2}arg_key>\n<{_K2}arg_value>{{value}}</{_K2}arg_value>\n",
        f"<{_K2}tool_calls>\n",
        f"</{_K2}tool_calls>",
    ),
    "kimi_k2": _each(
        "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{json}"
        "<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "kimi_k3": _tags(
        '<|open|>call tool="{name}" index="{number}"<|sep|>{arguments}<|close|>call<|sep|>',
        '<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>',
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
    ),
    "lfm2": _python("<|tool_call_start|>[", "]<|tool_call_end|>"),
    "ling3": _GLM,
    "llama3_json": _json(between="; ", opening="<|python_tag|>", arguments="parameters"),
    "llama4_json": _json(between="; ", opening="<|python_tag|>", arguments="parameters"),
    "llama4_pythonic": _python("<|python_start|>[", "]<|python_end|>"),
    "longcat": _json("<longcat_tool_call>\n", "\n</longcat_tool_call>\n"),
    "mimo": _tags(
        "<tool_call>\n<function={name}>{arguments}</function>\n</tool_call>\n",
        "<parameter={key}>{value}</parameter>",
    ),
    "minicpm5": _tags(
        '<function name="{name}">{arguments}</function>\n', '<param name="{key}">{value}</param>'
    ),
    "minimax_m2": _tags(
        '<invoke name="{name}">\n{arguments}</invoke>\n',
        '<parameter name="{key}">{value}</parameter>\n',
        "<minimax:tool_call>\n",
        "</minimax:tool_call>",
    ),
    "minimax_m3": _minimax,
    "mistral": _json(between=", ", opening="[TOOL_CALLS][", closing="]"),
    "muse": _MUSE,
    "muse_glimmer": _MUSE,
    "musespark1x": _MUSE,
    "olmo3": _python("<function_calls>\n", "\n</function_calls>", "\n"),
    "phi4_mini_json": _json(between=", ", opening="functools[", closing="]"),
    "plamo3": _each(
        "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{name}"
        "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json"
        "<|plamo:msg|>{json}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
        "<|plamo:begin_tool_requests:plamo|>",
        "<|plamo:end_tool_requests:plamo|>",
    ),
    "poolside_v1": _GLM,
    "pythonic": _python("[", "]"),
    "qwen3_coder": _QWEN,
    "qwen3_xml": _QWEN,
    "seed_oss": _tags(
        "<seed:tool_call>\n<function={name}>\n{arguments}</function>\n</seed:tool_call>\n",
        "<parameter={key}>{value}</parameter>\n",
    ),
    "step3": _tags(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">{arguments}'
        "</steptml:invoke><｜tool_call_end｜>\n",
        '<steptml:parameter name="{key}">{value}</steptml:parameter>',
        "<｜tool_calls_begin｜>\n",
        "<｜tool_calls_end｜>",
    ),
    "step3p5": _QWEN,
    "step5": _QWEN,
    "xlam": _json(between=", ", opening="[", closing="]"),
}
ONE_CALL = {"gigachat3", "internlm"}
"""Parsers of one call an answer."""
CALLS_ALONE = {
    *("granite-20b-fc", "hunyuan_a13b", "llama3_json", "llama4_json", "llama4_pythonic", "olmo3"),
    *("pythonic", "xlam"),
}
"""Parsers that know calls only where an answer begins with them."""
OTHER_MARKS = "<think></think>[TOOL_CALLS]<assistant><|assistant|>"
"""That some parsers expect in a vocabulary."""
PIECES = {"olmo3": ("Ġ</", "</", "think")}
"""In place of whole marks, for a parser whose model has none."""
THINK = ("<think>\n", "\n</think>\n")
_TO_SELF = (" to=self<|message|>", "<|eom|><|start|>assistant to=user<|message|>")
REASONING_MARKS: dict[str, tuple[str, str]] = {
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "granite": ("Here is my thought process:", "Here is my response:"),
    "hunyuan_a13b": ("<think>\n", "\n</think>\n<answer>\n"),
    "inkling": (
        "<|message_model|><|content_thinking|>",
        "<|end_message|><|message_model|><|content_text|>",
    ),
    "k2_horizon": ("<ifm|think>", "</ifm|think>"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "muse": _TO_SELF,
    "muse_glimmer": _TO_SELF,
    "musespark1x": _TO_SELF,
    "plamo3": ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}
"""Of those that look for others than `THINK`."""
TEMPLATE = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"function": "{content}"},
        },
        "content": {},
    },
}
"""Of a tokenizer for parsers that follow one."""
_MELODY = "needs the package cohere_melody, which is not installed"
_HARMONY = "is a stub: vLLM's HarmonyParser reads gpt-oss, and its vocabulary is a download"
NOT_DRIVEN = {
    "cohere_command3": _MELODY,
    "cohere_command4": _MELODY,
    "openai": _HARMONY,
    "openai_gptoss": _HARMONY,
}
