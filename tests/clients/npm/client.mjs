// The openai npm package against the service at argv[2]; prints one JSON object with what it got.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const ask = (word, more = {}) => ({ model: "tiny", messages: [{ role: "user", content: word }], ...more });
const got = {};

const whole = await client.chat.completions.create(ask("npm-whole"));
got.whole = whole.choices[0].message.content;
got.usage = whole.usage.completion_tokens;

const stream = await client.chat.completions.create(
  ask("npm-stream", { stream: true, stream_options: { include_usage: true } }),
);
got.roles = [];
got.text = "";
got.reasons = [];
for await (const chunk of stream) {
  for (const choice of chunk.choices) {
    if (choice.delta.role) got.roles.push(choice.delta.role);
    got.text += choice.delta.content ?? "";
    if (choice.finish_reason) got.reasons.push(choice.finish_reason);
  }
  if (chunk.usage) got.streamUsage = chunk.usage.completion_tokens;
}

const runner = client.chat.completions.stream(ask("npm-stream"));
got.helper = (await runner.finalChatCompletion()).choices[0].message.content;

const completion = await client.completions.create({ model: "tiny", prompt: "npm-text", max_tokens: 8 });
got.completion = completion.choices[0].text;

got.models = (await client.models.list()).data.map((model) => model.id);
got.model = (await client.models.retrieve("tiny")).id;

got.errors = {};
for (const [name, body] of [
  ["missing", ask("x", { model: "nobody" })],
  ["wrong", ask("x", { temperature: -1 })],
  ["long", ask("x".repeat(9000))],
]) {
  try {
    await client.chat.completions.create(body);
  } catch (error) {
    got.errors[name] = [error.constructor.name, error.status, error.param, error.message];
  }
}

const left = await client.chat.completions.create(ask("npm-left", { stream: true }));
for await (const chunk of left) {
  if (chunk.choices[0]?.delta.content) break; // leaves the stream: the package aborts the request
}
got.left = true;

console.log(JSON.stringify(got));
