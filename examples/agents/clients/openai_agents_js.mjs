// requires: @openai/agents@0.20.0 openai@7.59.0 zod@4.6.7
// An agent of openai-agents in JavaScript, responses.
import { createInterface } from "node:readline/promises";
import { Agent, OpenAIResponsesModel, run, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";

setTracingDisabled(true);
const task = JSON.parse(await createInterface({ input: process.stdin }).question(""));
const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey } = process.env;
const add = tool({
  name: "add",
  description: "Add two numbers.",
  parameters: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => String(a + b),
});
const model = new OpenAIResponsesModel(new OpenAI({ baseURL, apiKey }), "policy");
const agent = new Agent({ name: "adder", model, tools: [add] });
console.log(JSON.stringify((await run(agent, task.messages[0].content)).finalOutput));
