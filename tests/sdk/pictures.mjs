// Checks a running server with the vision-language checkpoint of the tests through the Node libraries of OpenAI,
// Anthropic and Vercel: each sends a red and a blue picture and gets answers that depend on them. The server runs with
// `--thinking off`.
//
//     node pictures.mjs http://127.0.0.1:5413/v1

import assert from 'node:assert/strict';
import { crc32, deflateSync } from 'node:zlib';
import OpenAI from 'openai';
import Anthropic from '@anthropic-ai/sdk';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText } from 'ai';

globalThis.AI_SDK_LOG_WARNINGS = false;

const base = process.argv[2];
const root = base.replace(/\/v1$/, '');
const openai = new OpenAI({ baseURL: base, apiKey: 'unused', maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: root, apiKey: 'unused', maxRetries: 0 });
const model = (await openai.models.list()).data[0].id;
const QUESTION = 'Which colour?';
const TOKENS = 8;

function png(...colour) {
  const chunk = (kind, data) => {
    const body = Buffer.concat([Buffer.from(kind), data]);
    const [length, checksum] = [Buffer.alloc(4), Buffer.alloc(4)];
    length.writeUInt32BE(data.length);
    checksum.writeUInt32BE(crc32(body));
    return Buffer.concat([length, body, checksum]);
  };
  const header = Buffer.alloc(13);
  header.writeUInt32BE(64, 0);
  header.writeUInt32BE(64, 4);
  header.set([8, 2], 8);
  const row = [0, ...Array(64).fill(colour).flat()];
  const rows = Buffer.from(Array(64).fill(row).flat());
  const start = Buffer.from('89504e470d0a1a0a', 'hex');
  return Buffer.concat([start, chunk('IHDR', header), chunk('IDAT', deflateSync(rows)), chunk('IEND', Buffer.alloc(0))]);
}

const url = (data) => `data:image/png;base64,${data.toString('base64')}`;

async function openaiChat(data) {
  const content = [{ type: 'text', text: QUESTION }, { type: 'image_url', image_url: { url: url(data), detail: 'high' } }];
  const answer = await openai.chat.completions.create({
    model,
    messages: [{ role: 'user', content }],
    temperature: 0,
    max_tokens: TOKENS,
  });
  return answer.choices[0].message.content;
}

async function anthropicMessages(data) {
  const source = { type: 'base64', media_type: 'image/png', data: data.toString('base64') };
  const content = [{ type: 'image', source }, { type: 'text', text: QUESTION }];
  const answer = await anthropic.messages.create({
    model,
    messages: [{ role: 'user', content }],
    temperature: 0,
    max_tokens: TOKENS,
  });
  return answer.content.map((block) => block.text).join('');
}

const vercel = (provider) => async (data) => {
  const content = [{ type: 'text', text: QUESTION }, { type: 'image', image: data, mediaType: 'image/png' }];
  const { text } = await generateText({
    model: provider,
    messages: [{ role: 'user', content }],
    temperature: 0,
    maxOutputTokens: TOKENS,
    maxRetries: 0,
  });
  return text;
};

const options = { baseURL: base, apiKey: 'unused' };
for (const [name, ask] of [
  ['OpenAI', openaiChat],
  ['Anthropic', anthropicMessages],
  ['Vercel: OpenAI-compatible', vercel(createOpenAICompatible({ name: 'moestro', ...options })(model))],
  ['Vercel: OpenAI Responses', vercel(createOpenAI(options).responses(model))],
  ['Vercel: Anthropic', vercel(createAnthropic(options)(model))],
]) {
  const answers = [];
  for (const picture of [png(255, 0, 0), png(0, 0, 255), png(255, 0, 0)]) answers.push(await ask(picture));
  const [red, blue, again] = answers;
  assert.ok(red, name);
  assert.equal(red, again, name);
  assert.notEqual(red, blue, name);
  console.log(`ok      pictures.mjs: ${name}`);
}
