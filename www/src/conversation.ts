// The messages so far: what the model is sent, and how they are shown.

import type { ChatMessage } from 'outrider';
import { byId, element } from './dom.js';

export class Conversation {
  readonly #log = byId<HTMLOListElement>('log');
  readonly #scroll = byId('scroll');
  readonly #welcome = byId('welcome');
  readonly #clear = byId<HTMLButtonElement>('clear');
  readonly messages: ChatMessage[] = [];

  addUser(text: string): void {
    this.messages.push({ role: 'user', content: text });
    this.#append('user', text);
    this.#scroll.scrollTo({ top: this.#scroll.scrollHeight });
  }

  /** Begins a reply, which takes text until it is finished. */
  beginReply(): Reply {
    const item = this.#append('assistant', '');
    item.dataset['streaming'] = '';
    return new Reply(this, item, this.#scroll);
  }

  /** Takes back the last question, which got no answer, so that the model is not sent two in a row. */
  takeBack(): void {
    if (this.messages.at(-1)?.role === 'user') this.messages.pop();
  }

  clear(): void {
    this.messages.length = 0;
    this.#log.replaceChildren();
    this.#show();
  }

  #append(role: 'user' | 'assistant', text: string): HTMLLIElement {
    const item = element('li', 'message');
    item.dataset['role'] = role;
    item.dataset['testid'] = `message-${role}`;
    item.append(element('span', 'text', text));
    this.#log.append(item);
    this.#show();
    return item;
  }

  #show(): void {
    const empty = this.#log.childElementCount === 0;
    this.#welcome.hidden = !empty;
    this.#clear.disabled = empty;
  }
}

export class Reply {
  #text = '';
  readonly #conversation: Conversation;
  readonly #item: HTMLLIElement;
  readonly #scroll: HTMLElement;

  constructor(conversation: Conversation, item: HTMLLIElement, scroll: HTMLElement) {
    this.#conversation = conversation;
    this.#item = item;
    this.#scroll = scroll;
  }

  add(text: string): void {
    // Who has scrolled up to read is left where they are.
    const atEnd = this.#scroll.scrollHeight - this.#scroll.scrollTop - this.#scroll.clientHeight < 48;
    this.#text += text;
    this.#item.querySelector('.text')!.textContent = this.#text;
    if (atEnd) this.#scroll.scrollTo({ top: this.#scroll.scrollHeight });
  }

  /** A reply that was cut short stays in the conversation, for the model to go on from. */
  finish(foot = ''): void {
    delete this.#item.dataset['streaming'];
    // The conversation was cleared meanwhile.
    if (!this.#item.isConnected) return;
    if (foot) {
      const note = element('span', 'foot', foot);
      note.dataset['testid'] = 'message-foot';
      this.#item.append(note);
    }
    if (this.#text) this.#conversation.messages.push({ role: 'assistant', content: this.#text });
    else this.#conversation.takeBack();
    if (!this.#text && !foot) this.#item.remove();
  }
}
