/** What the engine worker is asked to load. */
export interface LoadArgs {
  address: string;
  directory: string;
  budget: number | null;
  backend: 'auto' | 'gpu' | 'cpu';
  context: number | null;
  f16: boolean;
  /** Bring what has changed on the server. */
  update: boolean;
  /** Open files as exclusively as Safari does. */
  exclusive: boolean;
}
