// Checks a running server with the demo model through the Node libraries of OpenAI, Anthropic and Vercel.
//
//     node clients.mjs http://127.0.0.1:5413/v1

import assert from 'node:assert/strict';
import OpenAI from 'openai';
import Anthropic from '@anthropic-ai/sdk';
import { createOpenAI } from '@ai-sdk/openai';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, Output, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

globalThis.AI_SDK_LOG_WARNINGS = false;

const base = process.argv[2];
const root = base.replace(/\/v1$/, '');
const openai = new OpenAI({ baseURL: base, apiKey: 'unused', maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: root, apiKey: 'unused', maxRetries: 0 });
const model = (await openai.models.list()).data[0].id;

const SUM = 'What is 12+7?';
const ANSWER = '12 + 7 = 19.';
const CITIES = ['Paris', 'Oslo', 'Rome', 'Madrid', 'Berlin', 'Vienna', 'Lisbon', 'Athens', 'Dublin', 'Cairo'];
const TURNS = 30;
const RESULT = JSON.stringify({ sky: 'sunny', temperature: 21 });
const SCHEMA = {
  type: 'object',
  properties: { city: { type: 'string', description: 'Name of the city' } },
  required: ['city'],
};
const NAME = 'get_weather';
const DESCRIPTION = 'Get the current weather of a city.';
const WORD = {
  type: 'object',
  properties: { word: { enum: ['a', 'b'] } },
  required: ['word'],
  additionalProperties: false,
};
const question = (turn) => `What is the weather in ${CITIES[turn % CITIES.length]}?`;
const user = (content) => ({ role: 'user', content });

/** Requires the tool in every other turn, because the demo model no longer calls it after thousands of tokens. */
const toolChoice = (turn, step, word = 'required') => (turn % 2 && step === 0 ? word : 'auto');

let calls = 0;

/** Waits until the engine is idle: a disconnected client must not keep it busy. */
async function idle() {
  for (let i = 0; i < 3000; i++) {
    const { requests } = await (await fetch(`${root}/health`)).json();
    if (requests.running === 0 && requests.queued === 0) return;
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  assert.fail('the engine is still busy');
}

async function openaiChat() {
  const messages = [user(SUM)];
  const answer = await openai.chat.completions.create({ model, messages, temperature: 0 });
  assert.equal(answer.choices[0].message.content, ANSWER);
  const stream = openai.chat.completions.stream({ model, messages, temperature: 0 });
  assert.equal((await stream.finalChatCompletion()).choices[0].message.content, ANSWER);
  await assert.rejects(openai.chat.completions.create({ model, messages: [] }), OpenAI.BadRequestError);
  const aborted = await openai.chat.completions.create({ model, messages: [user('Tell me a story.')], stream: true });
  for await (const _ of aborted) break;
  await idle();
  assert.match(answer.choices[0].message.reasoning_content, /19/);
  const form = { type: 'json_schema', json_schema: { name: 'word', strict: true, schema: WORD } };
  const word = await openai.chat.completions.create({ model, messages, response_format: form });
  assert.ok(['a', 'b'].includes(JSON.parse(word.choices[0].message.content).word));
}

async function openaiChatLoop(keeps) {
  const tools = [{ type: 'function', function: { name: NAME, description: DESCRIPTION, parameters: SCHEMA } }];
  const messages = [];
  for (let turn = 0; turn < TURNS; turn++) {
    messages.push(user(question(turn)));
    for (let step = 0; step < 2; step++) {
      const ask = { model, messages, tools, tool_choice: toolChoice(turn, step), temperature: 0 };
      // The stream of the library keeps only the last delta of unknown fields such as reasoning_content.
      const answer = keeps
        ? (await openai.chat.completions.create(ask)).choices[0].message
        : (await openai.chat.completions.stream(ask).finalChatCompletion()).choices[0].message;
      if (keeps) assert.ok(answer.reasoning_content);
      else delete answer.reasoning_content;
      messages.push(answer);
      for (const call of answer.tool_calls ?? []) {
        assert.equal(typeof JSON.parse(call.function.arguments), 'object');
        messages.push({ role: 'tool', tool_call_id: call.id, content: RESULT });
        calls++;
      }
      if (!answer.tool_calls?.length) break;
    }
  }
}

async function openaiResponses() {
  const answer = await openai.responses.create({ model, input: SUM, temperature: 0 });
  assert.equal(answer.output_text, ANSWER);
  const final = await openai.responses.stream({ model, input: SUM, temperature: 0 }).finalResponse();
  assert.equal(final.output_text, ANSWER);
  await assert.rejects(openai.responses.create({ model, input: [] }), OpenAI.BadRequestError);
  assert.deepEqual(answer.output.map((item) => item.type), ['reasoning', 'message']);
  const format = { type: 'json_schema', name: 'word', strict: true, schema: WORD };
  const word = await openai.responses.create({ model, input: SUM, text: { format } });
  assert.ok(['a', 'b'].includes(JSON.parse(word.output_text).word));
  const aborted = await openai.responses.create({ model, input: 'Tell me a story.', stream: true });
  for await (const _ of aborted) break;
  await idle();
}

async function openaiResponsesLoop(keeps) {
  const tools = [{ type: 'function', name: NAME, description: DESCRIPTION, parameters: SCHEMA, strict: false }];
  const input = [];
  for (let turn = 0; turn < TURNS; turn++) {
    input.push(user(question(turn)));
    for (let step = 0; step < 2; step++) {
      const ask = { model, input, tools, tool_choice: toolChoice(turn, step), temperature: 0, store: false };
      const stream = openai.responses.stream(ask);
      const answer = await stream.finalResponse();
      input.push(...answer.output.filter((item) => keeps || item.type !== 'reasoning'));
      const called = answer.output.filter((item) => item.type === 'function_call');
      for (const call of called) {
        assert.equal(typeof JSON.parse(call.arguments), 'object');
        input.push({ type: 'function_call_output', call_id: call.call_id, output: RESULT });
        calls++;
      }
      if (!called.length) break;
    }
  }
}

async function anthropicMessages() {
  const ask = { model, max_tokens: 300, messages: [user(SUM)] };
  assert.equal((await anthropic.messages.create(ask)).content[0].text, ANSWER);
  const thinking = { type: 'enabled', budget_tokens: 1024 };
  const final = await anthropic.messages.stream({ ...ask, max_tokens: 2000, thinking }).finalMessage();
  assert.deepEqual(final.content.map((block) => block.type), ['thinking', 'text']);
  assert.equal(final.content[1].text, ANSWER);
  await assert.rejects(anthropic.messages.create({ ...ask, messages: [] }), Anthropic.BadRequestError);
  const aborted = anthropic.messages.stream({ ...ask, messages: [user('Tell me a story.')] });
  for await (const _ of aborted) break;
  aborted.abort();
  await idle();
  // The runner first asks the server to store the conversation.
  const inputs = [];
  const run = (input) => (inputs.push(input), RESULT);
  const tools = [{ name: NAME, description: DESCRIPTION, input_schema: SCHEMA, parse: (input) => input, run }];
  const runner = anthropic.beta.messages.toolRunner({ ...ask, messages: [user(question(0))], tools, temperature: 0 });
  assert.equal((await runner.runUntilDone()).stop_reason, 'end_turn');
  assert.deepEqual(inputs, [{ city: 'Paris' }]);
  const output_config = { format: { type: 'json_schema', schema: WORD } };
  const word = await anthropic.messages.create({ ...ask, output_config });
  assert.ok(['a', 'b'].includes(JSON.parse(word.content[0].text).word));
  const prefilled = [...ask.messages, { role: 'assistant', content: '12 + 7 =' }];
  assert.equal((await anthropic.messages.create({ ...ask, messages: prefilled })).content[0].text, ' 19.');
}

async function anthropicLoop(keeps) {
  const tools = [{ name: NAME, description: DESCRIPTION, input_schema: SCHEMA }];
  const messages = [];
  for (let turn = 0; turn < TURNS; turn++) {
    messages.push(user(question(turn)));
    for (let step = 0; step < 2; step++) {
      const tool_choice = { type: toolChoice(turn, step, 'any') };
      const ask = { model, max_tokens: 2000, messages, tools, tool_choice, thinking: { type: 'adaptive' } };
      const answer = await anthropic.messages.stream(ask).finalMessage();
      const content = answer.content.filter((block) => keeps || block.type !== 'thinking');
      messages.push({ role: 'assistant', content });
      const called = answer.content.filter((block) => block.type === 'tool_use');
      if (!called.length) break;
      messages.push(user(called.map((call) => ({ type: 'tool_result', tool_use_id: call.id, content: RESULT }))));
      calls += called.length;
    }
  }
}

const providers = {
  compatible: createOpenAICompatible({ name: 'moestro', baseURL: base, apiKey: 'unused', supportsStructuredOutputs: true })(model),
  chat: createOpenAI({ baseURL: base, apiKey: 'unused' }).chat(model),
  responses: createOpenAI({ baseURL: base, apiKey: 'unused' }).responses(model),
  anthropic: createAnthropic({ baseURL: base, apiKey: 'unused' })(model),
};

async function vercel() {
  for (const [name, provider] of Object.entries(providers)) {
    const ask = { model: provider, prompt: SUM, temperature: 0, maxRetries: 0, maxOutputTokens: 300 };
    assert.equal((await generateText(ask)).text, ANSWER, name);
    assert.equal(await streamText(ask).text, ANSWER, name);
  }
  const reasoned = await generateText({ model: providers.compatible, prompt: SUM, temperature: 0, maxRetries: 0 });
  assert.match(reasoned.reasoningText, /19/);
}

/** Objects, errors, and a client that disconnects. */
async function vercelMore() {
  const schema = z.object({ word: z.enum(['a', 'b']) });
  for (const [name, provider] of Object.entries(providers)) {
    const ask = { model: provider, prompt: SUM, maxRetries: 0, maxOutputTokens: 600 };
    const { output } = await generateText({ ...ask, output: Output.object({ schema }) });
    assert.ok(['a', 'b'].includes(output.word), name);
    await assert.rejects(generateText({ ...ask, prompt: 'x '.repeat(400_000) }), { statusCode: 400 }, name);
    const control = new AbortController();
    const story = streamText({ ...ask, prompt: 'Tell me a story.', abortSignal: control.signal, onError() {} });
    for await (const part of story.fullStream) {
      if (part.type.endsWith('delta')) control.abort();
    }
    await idle();
  }
}

const withoutReasoning = (message) =>
  Array.isArray(message.content)
    ? { ...message, content: message.content.filter((part) => part.type !== 'reasoning') }
    : message;

async function vercelLoop(name, keeps) {
  const tools = {
    get_weather: tool({
      description: DESCRIPTION,
      inputSchema: z.object({ city: z.string().describe('Name of the city') }),
      execute: async ({ city }) => {
        assert.equal(typeof city, 'string');
        calls++;
        return { sky: 'sunny', temperature: 21 };
      },
    }),
  };
  let messages = [];
  for (let turn = 0; turn < TURNS; turn++) {
    messages.push(user(question(turn)));
    const ask = { model: providers[name], messages, tools, temperature: 0, maxRetries: 0, stopWhen: stepCountIs(2) };
    const prepareStep = ({ stepNumber }) => ({ toolChoice: toolChoice(turn, stepNumber) });
    const { response, text } = await generateText({ ...ask, prepareStep });
    assert.doesNotMatch(text, /<tool_call|<function|think>/);
    messages = messages.concat(keeps ? response.messages : response.messages.map(withoutReasoning));
  }
}

const checks = [openaiChat, openaiResponses, anthropicMessages, vercel, vercelMore];
const loops = [true, false].flatMap((keeps) => [
  ...[openaiChatLoop, openaiResponsesLoop, anthropicLoop].map((loop) => ({ name: loop.name, run: () => loop(keeps) })),
  ...Object.keys(providers).map((name) => ({ name: `vercelLoop, ${name}`, run: () => vercelLoop(name, keeps) })),
].map(({ name, run }) => ({ name: `${name}, ${keeps ? 'with reasoning' : 'without reasoning'}`, run })));
let failed = 0;
for (const check of [...checks.map((run) => ({ name: run.name, run })), ...loops]) {
  calls = 0;
  try {
    await check.run();
    assert.ok(!calls || calls >= TURNS / 2, `${calls} calls`);
    console.log(`ok      ${check.name}${calls ? ` (${calls} calls in ${TURNS} turns)` : ''}`);
  } catch (error) {
    failed++;
    console.log(`FAILED  ${check.name}: ${String(error.stack ?? error).slice(0, 700)}`);
  }
}
console.log(`${checks.length + loops.length - failed} of ${checks.length + loops.length} checks passed (node ${process.version})`);
process.exit(failed ? 1 : 0);
