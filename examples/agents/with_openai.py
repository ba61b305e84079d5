"""An agent with the client of OpenAI: the policy may call a tool, whose result it reads.

grpo-jax train --model DIR --task rows.jsonl --agent examples/agents/with_openai.py:run --max-turns 4 \
    --environment-tokens 200
A row of rows.jsonl: {"prompt": "How much is 17 * 23?", "answer": "391"}
"""

import json

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
FUNCTION = {"name": "multiply", "description": "Multiplies two numbers.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]


def result_of(call):
    """Returns the result of a call as text, or its error."""
    try:
        arguments = json.loads(call.function.arguments)
        return str(arguments["a"] * arguments["b"])
    except Exception as error:
        return f"Error: {error}"


async def run(example, client):
    """Asks until the policy calls no tool. The reward is 1 if the answer is in its last message."""
    messages = [{"role": "user", "content": example["prompt"]}]
    while True:
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        if not message.tool_calls:
            return float(example["answer"] in message.content)
        messages.append(message.model_dump())
        messages += [{"role": "tool", "tool_call_id": x.id, "content": result_of(x)} for x in message.tool_calls]
