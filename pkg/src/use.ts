// Who uses a model's files, over all tabs: locks tell, and are let go of however a worker ends.

export class Use {
  readonly #name: string;
  #release = () => {};
  #released: Promise<unknown> = Promise.resolve();

  constructor(name: string) {
    this.#name = name;
  }

  /** Whether nobody else uses the files; then nobody does until {@link share}. */
  claim(): Promise<boolean> {
    return this.#hold({ mode: 'exclusive', ifAvailable: true });
  }

  /** Uses the files beside others, for as long as this worker lives. */
  async share(): Promise<void> {
    await this.#hold({ mode: 'shared' });
  }

  async #hold(options: LockOptions): Promise<boolean> {
    this.#release();
    await this.#released;
    // Without locks nobody can know.
    if (!navigator.locks) return false;
    return new Promise((held, failed) => {
      this.#released = navigator.locks
        .request(this.#name, options, (lock) => {
          held(lock !== null);
          return lock && new Promise<void>((resolve) => (this.#release = resolve));
        })
        .catch(failed);
    });
  }
}
