// Checks Ollama's API of a running server with the demo model through ollama-js:
//     node ollama_clients.mjs http://127.0.0.1:11434
import assert from 'node:assert/strict';
import { Ollama } from 'ollama';

const ollama = new Ollama({ host: process.argv[2] });
const model = (await ollama.list()).models[0].model;
const options = { temperature: 0, num_predict: 200 };
const sum = [{ role: 'user', content: 'What is 12+7?' }];
const answer = '12 + 7 = 19.';

const whole = await ollama.chat({ model, messages: sum, options });
assert.equal(whole.message.content, answer);
assert.ok(whole.message.thinking && whole.done && whole.eval_count > 5);

let text = '';
for await (const part of await ollama.chat({ model, messages: sum, options, stream: true })) text += part.message.content;
assert.equal(text, answer);

text = '';
for await (const part of await ollama.generate({ model, prompt: sum[0].content, options, stream: true })) text += part.response;
assert.equal(text, answer);

const parameters = { type: 'object', required: ['city'], properties: { city: { type: 'string', description: 'Name of the city' } } };
const tools = [{ type: 'function', function: { name: 'get_weather', description: 'Get the current weather of a city.', parameters } }];
const called = await ollama.chat({ model, messages: [{ role: 'user', content: 'What is the weather in Oslo?' }], tools, options });
assert.deepEqual(called.message.tool_calls.map((call) => call.function), [{ name: 'get_weather', arguments: { city: 'Oslo' } }]);

assert.ok((await ollama.show({ model })).capabilities.includes('tools'));
await assert.rejects(ollama.show({ model: 'nothing/here' }), /does not exist/);
console.log('ok      ollama-js');
