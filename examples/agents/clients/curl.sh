#!/usr/bin/env bash
# curl and jq, chat completions.
# usage: rollout.agent="bash examples/agents/clients/curl.sh" (the task is on standard input)
set -euo pipefail
tool='{type: "function", function: {name: "add", parameters:
  {type: "object", properties: {a: {type: "number"}, b: {type: "number"}}}}}'
asked=$(jq -c "{model: \"policy\", tools: [$tool], messages}")
while true; do
  turn=$(curl -sS --fail-with-body "$OPENAI_BASE_URL/chat/completions" -d "$asked" \
    -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" |
    jq -c '.choices[0].message')
  if jq -e '.tool_calls | not' <<< "$turn" > /dev/null; then
    jq -c .content <<< "$turn"
    exit
  fi
  asked=$(jq -c --argjson turn "$turn" '.messages += [$turn] + [$turn.tool_calls[] |
    {role: "tool", tool_call_id: .id,
     content: (.function.arguments | fromjson | .a + .b | tostring)}]' <<< "$asked")
done
