"""Chat templates in miniature, each with one habit of the templates that models ship with."""

from __future__ import annotations

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

THINKING = """\
{%- set last = namespace(user=0) %}
{%- for m in messages[::-1] %}{% if m.role == 'user' and not last.user %}
{%- set last.user = messages | length - loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' and loop.index0 >= last.user %}
        {{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}
    {%- endif %}
    {{- m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- '<tool_call>' + call.function.name + ' ' + call.function.arguments | tojson + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' + ('<think>\n' if open_thought else '') }}{% endif %}"""
"""Qwen3: answers before the last question lose their reasoning, the others have a block for it."""

CHANNELS = """\
{%- if tools %}<|start|>developer<|message|>{% for t in tools %}{{ t.function.name }} {% endfor %}<|end|>{% endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if m.thinking and loop.last %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {%- if m.tool_calls %}
            {{- '<|start|>assistant to=' + m.tool_calls[0].function.name + '<|message|>' }}
            {{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
            {{- '<|return|>' if loop.last else '<|end|>' }}
        {%- endif %}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
"""gpt-oss: the last answer ends otherwise than earlier ones; reasoning is read as `thinking`."""

TRAILING_END = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
"""Phi-3: the end-of-text token follows the last turn alone, where in use the opening of an answer stands."""

TOOL_OUTPUTS = """\
{%- set ns = namespace(tool=false, system='') %}
{%- for m in messages %}{% if m.role == 'system' %}{% set ns.system = ns.system + m.content %}{% endif %}{% endfor %}
{{- bos_token + ns.system }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<|User|>' + m.content }}{% endif %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {{- '<|Assistant|><|call|>' }}
        {%- for c in m.tool_calls %}{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}
        {{- '<|calls|></s>' }}
    {%- elif m.role == 'assistant' %}
        {{- ('<|outputs|>' if ns.tool else '<|Assistant|>') + m.content + '</s>' }}
    {%- endif %}
    {%- set ns.tool = m.role == 'tool' %}
    {%- if ns.tool %}{{ '<|output|>' + m.content }}{% endif %}
{%- endfor %}
{%- if ns.tool %}<|outputs|>{% elif add_generation_prompt %}<|Assistant|><think>
{% endif %}"""
"""DeepSeek: arguments are concatenated as text; a scan before the text; no opening after the output of a tool."""

NO_END = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""GLM: an answer has no end; the model stops at the first token of the next turn."""

ALTERNATING = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {{- '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"""
"""Gemma: another name for the assistant, and content without the blanks around it."""

INSTRUCTIONS = """\
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}
    {%- if m.role == 'user' %}
        {{- '<s>[INST] ' + (system + '\n' if loop.first and system else '') + m.content + ' [/INST]' }}
    {%- else %}{{ ' ' + m.content + ' </s>' }}{% endif %}
{%- endfor %}"""
"""Llama 2: the user's turn opens the answer, and holds the system's."""

BY_INDEX = """\
{%- for i in range(messages | length) %}
    {%- set m = messages[i] %}{% set next = messages[i + 1] if i + 1 < messages | length else none %}
    {{- '<|' + m.role + '|>' + m.content + '</s>' }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""Numbers instead of messages in the loop."""

IN_THE_LOOP = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '</s>\n' }}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
"""Zephyr: the opening of an answer is written by the pass of the last turn."""

PARTS = (
    "{% for m in messages %}{{ m.role | title + ':' }}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ ' ' + part.text }}{% else %}<image>{% endif %}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""Idefics and LLaVA: content is a list of parts."""

RESPONSES_INSIDE = """\
{%- for m in messages %}{% if m.role != 'tool' %}
    {{- '<turn>' + m.role + '\n' }}
    {%- for call in m.tool_calls or [] %}
        {{- '<call>' + call.function.name + call.function.arguments | tojson }}
    {%- endfor %}
    {%- if m.tool_calls %}
        {%- for k in range(loop.index, messages | length) %}
            {%- set follow = messages[k] %}
            {%- if follow.role == 'tool' %}{{ '<response>' + follow.content }}{% endif %}
        {%- endfor %}
    {%- else %}{{ m.content + '<end>\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<turn>assistant\n' }}{% endif %}"""
"""Gemma 4: the pass of an assistant's turn writes the answers of its tools too."""

COUNTING = """\
{%- macro number(id) %}{% set n = namespace(calls=0) %}{% for m in messages %}{% for call in m.tool_calls or [] %}
{%- if call.id == id %}{{ n.calls }}{% endif %}{% set n.calls = n.calls + 1 %}{% endfor %}{% endfor %}{% endmacro %}
{%- for m in messages %}
    {{- '<|turn|>' + m.role + '<|text|>' + (number(m.tool_call_id) if m.role == 'tool' else '') + m.content }}
    {%- for call in m.tool_calls or [] %}{{ call.function.name + call.function.arguments | tojson }}{% endfor %}
    {{- '<|end|>' }}
{%- endfor %}<|turn|>assistant<|text|>"""
"""Command R: a macro that loops over all turns, and the opening of a next answer in every rendering."""

INDENTED = """\
{% for m in messages %}
    {{ '### ' + m.role + ':\n' + m.content }}
{% endfor %}
{% if add_generation_prompt %}
{{ '### assistant:\n' }}
{% endif %}"""
"""Templates with the blanks of their source: before an answer other ones than in use."""

DATED = "{{ 'Today: ' + strftime_now('%d %b %Y') + '\n' }}" + CHATML
"""Llama 3.1 and gpt-oss: the date of today."""
