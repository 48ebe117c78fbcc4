// Asking the server, and what its errors mean to a person.

/** What went wrong, in words; `status` is 0 where there was no response. */
export class Problem extends Error {
  constructor(message, { status = 0, param = null, advice = "" } = {}) {
    super(message);
    this.status = status;
    this.param = param;
    this.advice = advice;
  }
}

const ADVICE = {
  400: "Change the message or the settings, and send it again.",
  401: "Enter a valid key under Settings.",
  404: "The server may have been started again with another model; reload the page.",
  429: "The server has more to do than it may keep waiting.",
  503: "The server is stopping, or short of memory.",
};

const UNREACHABLE = new Problem("The server cannot be reached.", {
  advice: "It may have been stopped. Start it again with “foretell serve”, then try again.",
});

const BROKEN = new Problem("The connection ended in the middle of the answer.", {
  advice: "The server may have been stopped. What had arrived is above.",
});

/** GET a JSON document. */
export async function get(path, key) {
  return (await ask(path, { headers: headers(key) })).json();
}

/** POST `body`; yields the chunks of the answer, an object for each event. */
export async function* stream(path, body, { key, signal }) {
  const response = await ask(path, {
    method: "POST",
    headers: { ...headers(key), "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  let done = false;
  for await (const data of events(response.body.getReader())) {
    done = data === "[DONE]";
    if (done) continue;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Problem(sentence(chunk.error.message), { status: 500 });
    yield chunk;
  }
  if (!done) throw BROKEN;
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, { credentials: "omit", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw UNREACHABLE;
  }
  if (!response.ok) throw await problem(response);
  return response;
}

async function problem(response) {
  let told = {};
  try {
    told = (await response.json()).error ?? {};
  } catch {
    // A proxy's page, say: the status has to do.
  }
  const wait = Number(response.headers.get("Retry-After"));
  const advice = [ADVICE[response.status] ?? "", wait ? `Try again in ${wait} s.` : ""];
  return new Problem(sentence(told.message ?? `The server answered ${response.status}`), {
    status: response.status,
    param: told.param ?? null,
    advice: advice.filter(Boolean).join(" "),
  });
}

function sentence(text) {
  const all = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?…]$/.test(all) ? all : `${all}.`;
}

/** The data of server-sent events, which this server puts into one line each. */
async function* events(reader) {
  const decoder = new TextDecoder();
  let rest = "";
  try {
    while (true) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw BROKEN;
      }
      if (part.done) return;
      const lines = (rest + decoder.decode(part.value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
