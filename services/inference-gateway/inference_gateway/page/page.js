"use strict";
// Puts the page together. The key lives in this one object: it is written nowhere and gone when the page is.

async function errorOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch (error) {
    return `the gateway answered with status ${answer.status}`;
  }
}

class Access {
  #key = "";
  refused = false; // nothing is asked until a key is given

  use(key) {
    this.#key = key;
    this.refused = false;
    notice("");
  }

  async fetch(path, options = {}) {
    const headers = { ...options.headers, ...(this.#key ? { authorization: `Bearer ${this.#key}` } : {}) };
    const answer = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
    if (answer.status === 401) {
      this.refused = true;
      notice(this.#key ? "This gateway does not know that key." : "This gateway asks for a key: give one above.");
      document.getElementById("state").textContent = "a key is needed";
      document.getElementById("key").focus();
    }
    return answer;
  }
}

function notice(text) {
  const place = document.getElementById("notice");
  place.textContent = text;
  place.hidden = !text;
}

const access = new Access(), chat = new Chat(access), status_ = new Status(access);
let seen = null; // the memories of the last look: the lists of choices follow them

document.getElementById("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = document.getElementById("key");
  access.use(field.value.trim());
  field.value = "";
  seen = null;
  status_.look();
});
document.addEventListener("seen", (event) => {
  if (event.detail === seen) return;
  seen = event.detail;
  chat.listModels();
});
status_.run();
