// The messages so far: what the model is sent, and how they are shown.

import type { ChatMessage } from 'outrider';
import { byId, element } from './dom.js';

/** What the buttons of a message do. */
export interface Actions {
  /** Takes a question back into the box, with all that came after it. */
  edit(text: string): void;
  /** Asks the last question once more. */
  retry(): void;
}

/** A question as it is shown, and where it stood among the messages; one that got no answer stands there no more. */
interface Question {
  text: string;
  at: number;
  item: HTMLLIElement;
}

export class Conversation {
  readonly #log = byId<HTMLOListElement>('log');
  readonly #scroll = byId('scroll');
  readonly #welcome = byId('welcome');
  readonly #clear = byId<HTMLButtonElement>('clear');
  readonly #actions: Actions;
  readonly #questions: Question[] = [];
  readonly messages: ChatMessage[] = [];

  constructor(actions: Actions) {
    this.#actions = actions;
  }

  addUser(text: string): void {
    const item = this.#append('user', text);
    const question = { text, at: this.messages.length, item };
    item.append(
      this.#button('edit', 'Edit', `Edit “${short(text)}”`, () => {
        this.#goBack(question);
        this.#actions.edit(text);
      }),
    );
    this.#questions.push(question);
    this.messages.push({ role: 'user', content: text });
    this.#scroll.scrollTo({ top: this.#scroll.scrollHeight });
  }

  /** Begins a reply, which takes text until it is finished. */
  beginReply(): Reply {
    this.#log.querySelector('[data-testid=message-retry]')?.remove();
    const item = this.#append('assistant', '');
    item.dataset['streaming'] = '';
    return new Reply(this, item, this.#scroll);
  }

  /** Puts the button that asks again under the last reply. */
  offerRetry(item: HTMLLIElement): void {
    item.append(
      this.#button('retry', 'Retry', 'Retry the last reply', () => {
        const question = this.#questions.at(-1);
        if (!question) return;
        this.#goBack(question);
        this.addUser(question.text);
        this.#actions.retry();
      }),
    );
  }

  /** Takes back the last question, which got no answer, so that the model is not sent two in a row. */
  takeBack(): void {
    if (this.messages.at(-1)?.role === 'user') this.messages.pop();
  }

  clear(): void {
    this.messages.length = 0;
    this.#questions.length = 0;
    this.#log.replaceChildren();
    this.#show();
  }

  /** Drops a question and all that came after it. */
  #goBack(question: Question): void {
    while (question.item.nextSibling) question.item.nextSibling.remove();
    question.item.remove();
    this.messages.length = Math.min(this.messages.length, question.at);
    this.#questions.length = this.#questions.indexOf(question);
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

  #button(id: string, text: string, label: string, act: () => void): HTMLButtonElement {
    const button = element('button', 'quiet act', text);
    button.type = 'button';
    button.dataset['testid'] = `message-${id}`;
    button.ariaLabel = label;
    button.addEventListener('click', act);
    return button;
  }

  #show(): void {
    const empty = this.#log.childElementCount === 0;
    this.#welcome.hidden = !empty;
    this.#clear.disabled = empty;
  }
}

function short(text: string): string {
  return text.length > 40 ? `${text.slice(0, 39)}…` : text;
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
    // The conversation was cleared, or taken back further, meanwhile.
    if (!this.#item.isConnected) return;
    if (foot) {
      const note = element('span', 'foot', foot);
      note.dataset['testid'] = 'message-foot';
      this.#item.append(note);
    }
    if (this.#text) this.#conversation.messages.push({ role: 'assistant', content: this.#text });
    else this.#conversation.takeBack();
    if (!this.#text && !foot) this.#item.remove();
    else this.#conversation.offerRetry(this.#item);
  }
}
