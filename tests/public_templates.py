# ruff: noqa: E501  (Jinja in pieces)
"""Short chat templates of our own with the traits of public models' templates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Public:
    """A template, and what is found out about it."""

    source: str
    reasoning: str | None = None
    """The format's name."""
    tools: str | None = None
    """The format's name. None if it takes none."""
    answer: str = "Fine, thanks."
    """As the model writes it, with a call of ``f`` if it can."""
    system: str = "S"
    """What becomes of the instructions S and then D. Empty if they are refused."""
    parts: tuple[str, ...] = ()
    """Roles that take parts."""
    refuses: tuple[str, ...] = ()
    """Roles that are refused by name."""


EACH = "{% for m in messages %}"
END = "{% endfor %}"
GENERATE = "{% if add_generation_prompt %}"
CHATML = EACH + "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}" + END
CHATML_TURN = GENERATE + "{{ '<|im_start|>assistant\n' }}{% endif %}"
ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/…') }}{% endif %}"
)
TOOL_LIST = "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
HERMES_CALLS = (
    '{% for c in m.tool_calls or [] %}{{ \'<tool_call>\n{"name": "\' + c.function.name + '
    "'\", \"arguments\": ' }}{{ c.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}"
)
CALL_HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'

PUBLIC = {
    "chatml": Public(CHATML + CHATML_TURN, system="S|D"),
    "vicuna": Public(
        "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{{ messages[0].content "
        "}} {% else %}{% set rest = messages %}A chat. {% endif %}{% for m in rest %}"
        "{% if m.role == 'user' %}USER: {{ m.content }} {% elif m.role == 'assistant' %}"
        "ASSISTANT: {{ m.content }}</s>{% endif %}{% endfor %}" + GENERATE + "ASSISTANT:{% endif %}",
        system="S+D", refuses=("tool",),
    ),
    "qwen2.5": Public(
        "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% else %}"
        "{% set s = 'You are helpful.' %}{% endif %}<|im_start|>system\n{{ s }}\n" + TOOL_LIST
        + "<|im_end|>\n" + EACH + "{% if m.role == 'user' or (m.role == 'system' and not loop.first)"
        " %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% elif m.role == 'assistant' %}"
        "<|im_start|>assistant\n{{ m.content }}" + HERMES_CALLS + "<|im_end|>\n{% elif m.role == "
        "'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response><|im_end|>\n"
        "{% endif %}" + END + CHATML_TURN,
        tools="hermes", answer=f"I look.\n{CALL_HERMES}", system="S|D",
    ),
    "qwen3": Public(
        TOOL_LIST + "{% set ns = namespace(last=messages|length - 1) %}{% for m in messages[::-1] %}"
        "{% if m.role == 'user' %}{% set ns.last = messages|length - 1 - loop.index0 %}{% break %}"
        "{% endif %}{% endfor %}" + EACH + "{% if m.content is string %}{% set content = m.content "
        "%}{% else %}{% set content = '' %}{% endif %}{% if m.role == 'assistant' %}"
        "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% if m.reasoning_content "
        "and loop.index0 > ns.last %}{% set content = '<think>\n' + m.reasoning_content + "
        "'\n</think>\n\n' + content %}{% endif %}{% endif %}<|im_start|>{{ m.role }}\n{{ content "
        "}}" + HERMES_CALLS + "<|im_end|>\n" + END + GENERATE + "<|im_start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
        "{% endif %}{% endif %}",
        "think", "hermes", f"<think>\nHm.\n</think>\n\nI look.\n{CALL_HERMES}", system="S|D",
    ),
    "qwen3.5": Public(
        TOOL_LIST + "{% macro text(content) %}{% if content is string %}{{ content }}{% else %}"
        "{% for item in content %}{% if 'text' in item %}{{ item.text }}{% else %}"
        "{{ raise_exception('Unexpected item') }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
        + EACH + "{% if m.role == 'system' %}{% if not loop.first %}{{ raise_exception('System "
        "message must be at the beginning.') }}{% endif %}<|im_start|>system\n{{ text(m.content) }}"
        "<|im_end|>\n{% elif m.role in ['user', 'assistant', 'tool'] %}<|im_start|>{{ m.role }}\n"
        "{{ text(m.content) }}<|im_end|>\n{% else %}{{ raise_exception('Unexpected role') }}"
        "{% endif %}" + END + GENERATE + "<|im_start|>assistant\n<think>\n{% endif %}"
        "{# <tool_call><function=f><parameter=a> #}{% set x = '<tool_call><function=' %}"
        "{% set y = '</think>' %}",
        "think", "qwen3_coder",
        "Hm.\n</think>\n\nI look.\n<tool_call>\n<function=f>\n<parameter=a>\nb\n</parameter>\n"
        "</function>\n</tool_call>", system="S+D",
    ),
    "qwen3.6": Public(
        "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}"
        "<|im_end|>\n{% endif %}" + EACH + "{% if m.role in ['user', 'assistant', 'tool'] %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}" + END + CHATML_TURN,
        system="S+D",
    ),
    "llama2": Public(
        "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set s = '<<SYS>>\n' + "
        "messages[0].content + '\n<</SYS>>\n\n' %}{% else %}{% set rest = messages %}{% set s = '' "
        "%}{% endif %}{% for m in rest %}" + ALTERNATE + "{% if m.role == 'user' %}{{ bos_token }}"
        "[INST] {{ (s if loop.first else '') + m.content.strip() }} [/INST]{% elif m.role == "
        "'assistant' %} {{ m.content.strip() }} {{ eos_token }}{% endif %}{% endfor %}",
        system="S+D",
    ),
    "llama3.1": Public(
        "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\nEnvironment: "
        "ipython\n" + TOOL_LIST + "<|eot_id|>{% endif %}" + EACH + "<|start_header_id|>{{ m.role if "
        "m.role != 'tool' else 'ipython' }}<|end_header_id|>\n\n{% if m.tool_calls %}"
        "{\"name\": \"{{ m.tool_calls[0].function.name }}\", \"parameters\": "
        "{{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content | trim }}"
        "{% endif %}<|eot_id|>" + END + GENERATE + "<|start_header_id|>assistant<|end_header_id|>"
        "\n\n{% endif %}",
        tools="llama3_json", answer='{"name": "f", "parameters": {"a": "b"}}', system="S|D",
    ),
    "llama4": Public(
        "{{ bos_token }}" + TOOL_LIST + "{# [func_name1(params_name1=…)] #}{% if tools %}"
        "[func_name1(params_name1=params_value1)]{% endif %}" + EACH + "<|header_start|>{{ m.role }}"
        "<|header_end|>\n\n{% if m.content is string %}{{ m.content }}{% else %}{% for c in "
        "m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|eot|>"
        + END + GENERATE + "<|header_start|>assistant<|header_end|>\n\n{% endif %}",
        tools="pythonic", answer="[f(a='b')]", system="S|D",
    ),
    "mistral": Public(
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set s = messages[0].content %}"
        "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}{% for m in rest "
        "%}{% if m.role == 'user' %}{% if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson "
        "}}[/AVAILABLE_TOOLS]{% endif %}[INST]{% if s is defined and loop.last %}{{ s + '\n\n' }}"
        "{% endif %}{{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS][{% for c in "
        "m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}"
        "{% endif %}{{ c.function | tojson }}{% endfor %}]{% elif m.role == 'assistant' %}"
        " {{ m.content }}{{ eos_token }}{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}"
        "[/TOOL_RESULTS]{% else %}{{ raise_exception('Only user and assistant roles') }}{% endif %}"
        "{% endfor %}",
        tools="mistral", answer='[TOOL_CALLS][{"name": "f", "arguments": {"a": "b"}}]',
        system="S+D",
    ),
    "magistral": Public(
        EACH + "{% if m.role == 'system' %}[SYSTEM_PROMPT]{% if m.content is string %}{{ m.content "
        "}}{% else %}{% for b in m.content %}{% if b.type == 'text' %}{{ b.text }}{% elif b.type == "
        "'thinking' %}[THINK]{{ b.thinking }}[/THINK]{% endif %}{% endfor %}{% endif %}"
        "[/SYSTEM_PROMPT]{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == "
        "'assistant' %}{{ m.content }}{{ eos_token }}{% else %}{{ raise_exception('Only user, system"
        " and assistant') }}{% endif %}" + END,
        "mistral", None, "[THINK]Hm.[/THINK]Fine, thanks.", system="S|D",
    ),
    "gemma": Public(
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not "
        "supported') }}{% endif %}" + EACH + ALTERNATE + "<start_of_turn>{{ 'model' if m.role == "
        "'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n" + END + GENERATE
        + "<start_of_turn>model\n{% endif %}",
        system="",
    ),
    "gemma3": Public(
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set s = messages[0].content if "
        "messages[0].content is string else messages[0].content[0].text %}{% set s = s + '\n\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set s = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}" + ALTERNATE + "<start_of_turn>{{ 'model' if m.role == 'assistant' else"
        " m.role }}\n{{ s if loop.first }}{% if m.content is string %}{{ m.content | trim }}"
        "{% elif m.content is iterable %}{% for i in m.content %}{{ i.text | trim }}{% endfor %}"
        "{% else %}{{ raise_exception('Invalid content type') }}{% endif %}<end_of_turn>\n"
        "{% endfor %}" + GENERATE + "<start_of_turn>model\n{% endif %}",
        system="S+D",
    ),
    "phi3": Public(
        EACH + "{% if m.role in ['system', 'user', 'assistant'] %}{{ '<|' + m.role + '|>\n' + "
        "m.content + '<|end|>\n' }}{% endif %}" + END + GENERATE + "{{ '<|assistant|>\n' }}"
        "{% endif %}",
        answer="Write <|end|> after each turn.", system="S|D", refuses=("tool",),
    ),
    "phi4-mini-reasoning": Public(
        EACH + "{{ '<|' + m.role + '|>' + m.content.split('</think>')[-1] + '<|end|>' }}" + END
        + GENERATE + "{{ '<|assistant|>' }}{% endif %}",
        "think", None, "<think>\nHm.\n</think>\nFine <|end|>.", system="S|D",
    ),
    "deepseek-r1": Public(
        "{% set ns = namespace(s='') %}" + EACH + "{% if m.role == 'system' %}{% set ns.s = ns.s + "
        "m.content %}{% endif %}" + END + "{{ bos_token }}{{ ns.s }}" + EACH + "{% if m.role == "
        "'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'assistant' and m.content is not none %}"
        "<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% elif m.role == "
        "'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}" + END
        + GENERATE + "<｜Assistant｜><think>\n{% endif %}",
        "think", None, "Hm.\n</think>\n\nFine, thanks.", system="SD",
    ),
    "gpt-oss": Public(
        "{%- macro tool_list(tools) %}{% for t in tools %}type {{ t.function.name }} = "
        "{{ t.function.parameters | tojson }};{% endfor %}{% endmacro %}"
        "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>"
        "{% if messages[0].role in ['developer', 'system'] %}<|start|>developer<|message|>"
        "{{ messages[0].content }}{% if tools %}{{ tool_list(tools) }}{% endif %}<|end|>{% endif %}"
        "{% set ns = namespace(call=none) %}" + EACH + "{% if m.role == 'user' %}<|start|>user"
        "<|message|>{{ m.content }}<|end|>{% elif m.role == 'assistant' %}{% if m.tool_calls %}"
        "{% set ns.call = m.tool_calls[0].function.name %}<|start|>assistant<|channel|>commentary "
        "to=functions.{{ ns.call }} <|constrain|>json<|message|>"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}<|start|>assistant"
        "<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% elif m.role == 'tool' %}"
        "{% if ns.call is none %}{{ raise_exception('a tool without a call') }}{% endif %}"
        "<|start|>functions.{{ ns.call }} to=assistant<|channel|>commentary<|message|>"
        "{{ m.content | tojson }}<|end|>{% endif %}" + END + GENERATE + "<|start|>assistant"
        "{% endif %}",
        "harmony", "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
        '<|message|>{"a": "b"}<|call|>', system="S+D",
    ),
    "glm4.5": Public(
        "[gMASK]<sop>{% if tools %}<|system|>\n" + TOOL_LIST + "<tool_call>{name}\n<arg_key>{key}"
        "</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>{% endif %}{% macro visible(content)"
        " %}{% if content is string %}{{ content }}{% else %}{% for i in content %}{{ i.text }}"
        "{% endfor %}{% endif %}{% endmacro %}" + EACH + "{% if m.role == 'user' %}<|user|>\n"
        "{{ visible(m.content) }}{% elif m.role == 'assistant' %}<|assistant|>\n<think></think>\n"
        "{{ visible(m.content) }}{% elif m.role == 'tool' %}<|observation|>\n{{ visible(m.content) }}"
        "{% elif m.role == 'system' %}<|system|>\n{{ visible(m.content) }}{% endif %}" + END
        + GENERATE + "<|assistant|>{% endif %}",
        "think", "glm45",
        "\n<think>Hm.</think>\nI look.\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>b"
        "</arg_value>\n</tool_call>", system="S|D",
    ),
    "granite": Public(
        EACH + "{%- if loop.first and m.role != 'system' %}<|start_of_role|>system<|end_of_role|>"
        "Today's Date: {{ strftime_now('%B %d, %Y') }}.<|end_of_text|>\n{% endif %}<|start_of_role|>"
        "{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n" + END + GENERATE
        + "<|start_of_role|>assistant<|end_of_role|>{% endif %}",
        system="S|D",
    ),
    "command-r": Public(
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] "
        "%}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages"
        " %}{% set system_message = false %}{% endif %}{% if system_message != false %}"
        "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{{ system_message }}<|END_OF_TURN_TOKEN|>{% endif %}"
        "{% for message in loop_messages %}{% set content = message['content'] %}{% if "
        "message['role'] == 'user' %}<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ content.strip() }}"
        "<|END_OF_TURN_TOKEN|>{% elif message['role'] == 'assistant' %}<|START_OF_TURN_TOKEN|>"
        "<|CHATBOT_TOKEN|>{{ content.strip() }}<|END_OF_TURN_TOKEN|>{% endif %}{% endfor %}"
        + GENERATE + "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
        system="S+D", refuses=("tool",),
    ),
    "mimo": Public(
        "{% macro render(message_content) %}{% for c in message_content %}{{ c.text }}{% endfor %}"
        "{% endmacro %}" + EACH + "<|{{ m.role }}|>{{ render(m.content) }}<|eos|>" + END + GENERATE
        + "<|assistant|>{% endif %}",
        system="S|D", parts=("system", "user", "assistant", "tool"),
    ),
    "set parts": Public(
        EACH + "{% set parts = m['content'] %}<{{ m.role }}>{% for c in parts %}{{ c['text'] }}"
        "{% endfor %}</s>" + END + GENERATE + "<assistant>{% endif %}",
        system="S|D", parts=("system", "user", "assistant", "tool"),
    ),
    "lines": Public(
        EACH + "<{{ m.role }}>{% for line in m.content.split('\n') %}{{ line }}\n{% endfor %}" + END
        + GENERATE + "<assistant>{% endif %}",
        system="S|D",
    ),
    "no system": Public(
        EACH + "{% if m.role == 'user' %}### Instruction:\n{{ m.content }}\n{% elif m.role == "
        "'assistant' %}### Response:\n{{ m.content }}\n{% endif %}" + END + GENERATE
        + "### Response:\n{% endif %}",
        system="user", refuses=("tool",),
    ),
}  # fmt: skip
