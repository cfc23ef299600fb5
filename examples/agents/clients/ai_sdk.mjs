// requires: ai@7.0.173 @ai-sdk/openai@3.0.141 @ai-sdk/openai-compatible@2.0.92 zod@4.6.7
// The AI SDK, chat completions.
import { createInterface } from "node:readline/promises";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, tool } from "ai";
import { z } from "zod";

const task = JSON.parse(await createInterface({ input: process.stdin }).question(""));
const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey } = process.env;
const add = tool({
  description: "Add two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: ({ a, b }) => String(a + b),
});
const { text } = await generateText({
  model: createOpenAICompatible({ name: "policy", baseURL, apiKey })("policy"),
  messages: task.messages,
  tools: { add },
  stopWhen: isStepCount(6),
});
console.log(JSON.stringify(text));
