// Sounds of messages: recognised by their content, or recorded, made WAV of 16 kHz, kept beside the
// pictures, played. A conversation holds {id, name, seconds} of each; the store has its bytes.

import { el } from "./element.js";
import * as store from "./store.js";
import { newId } from "./talk.js";

const RATE = 16000; // samples a second that every model takes
const MOST_BYTES = 100_000_000; // of a file before it is made WAV
const MOST_SECONDS = 1500; // whose WAV a request of the server's usual limit, 64 MiB, has room for
const HEADER = 44; // bytes of a WAV file before its samples

export const FORMATS = "WAV, MP3, Ogg, FLAC, M4A, AAC or WebM";
// First bytes of WAV, FLAC, Ogg, MP3 with a tag or without, AAC, WebM, and M4A. A video's sound is
// read as well. Not every browser reads all.
const SIGNATURE = new RegExp(
  [
    "RIFF.{4}WAVE",
    "fLaC",
    "OggS",
    "ID3",
    "\\xff[\\xe2-\\xe7\\xf1-\\xf7\\xf9-\\xff]",
    "\\x1a\\x45\\xdf\\xa3",
    ".{4}ftyp(?!avif|avis|heic|heix|mif1|msf1)",
  ]
    .map((each) => `^(?:${each})`)
    .join("|"),
  "s",
);

// Whether a file is a sound, whatever its name says.
export async function isSound(file) {
  const bytes = new Uint8Array(await file.slice(0, 32).arrayBuffer());
  return SIGNATURE.test(String.fromCharCode(...bytes));
}

// A sound's file as it is kept and sent, {blob, seconds}: WAV of 16 kHz, 16 bits and one channel,
// the mean of the file's. Throws where the file cannot be read, or is too long.
export async function toWav(file) {
  if (file.size > MOST_BYTES)
    throw new Error(`larger than ${MOST_BYTES / 1e6} MB, the limit for a sound`);
  // The context's rate is that of what it decodes to.
  const context = new OfflineAudioContext(1, 1, RATE);
  const sound = await context.decodeAudioData(await file.arrayBuffer()).catch(() => null);
  if (!sound?.length)
    throw new Error("the sound is damaged, or of a format that this browser cannot read");
  const seconds = sound.length / RATE;
  if (seconds > MOST_SECONDS)
    throw new Error(`${inTime(seconds)} long: the limit is ${inTime(MOST_SECONDS)}`);
  return { blob: wav(mean(sound)), seconds };
}

function mean(sound) {
  const made = sound.getChannelData(0).slice();
  for (let i = 1; i < sound.numberOfChannels; i++)
    sound.getChannelData(i).forEach((value, at) => (made[at] += value));
  return made.map((value) => value / sound.numberOfChannels);
}

function wav(samples) {
  const view = new DataView(new ArrayBuffer(HEADER + 2 * samples.length));
  const word = (at, text) => [...text].forEach((c, i) => view.setUint8(at + i, c.charCodeAt(0)));
  word(0, "RIFF");
  view.setUint32(4, view.byteLength - 8, true);
  word(8, "WAVEfmt ");
  view.setUint32(16, 16, true); // bytes of what follows
  view.setUint16(20, 1, true); // whole numbers
  view.setUint16(22, 1, true); // channels
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true); // bytes a second
  view.setUint16(32, 2, true); // bytes of a frame
  view.setUint16(34, 16, true); // bits
  word(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((value, i) => {
    const whole = Math.max(-32768, Math.min(32767, Math.round(32768 * value)));
    view.setInt16(HEADER + 2 * i, whole, true);
  });
  return new Blob([view], { type: "audio/wav" });
}

// Keeps a sound, and returns what a conversation holds of it. Where the browser stores no more,
// `unstored(error)` is called, and the sound is there until a reload.
export async function keep({ blob, seconds }, name, unstored = () => {}) {
  const sound = { id: newId(), name, seconds };
  await store.putPicture(sound.id, blob).catch(unstored);
  return sound;
}

// A sound that a file of conversations has, as `url`. Throws where it is none.
export async function fromUrl(url, name, unstored) {
  const [, base64] = /^data:audio\/[a-z]+;base64,(.+)$/s.exec(url);
  const blob = new Blob([Uint8Array.from(atob(base64), (each) => each.charCodeAt(0))]);
  if (!(await isSound(blob))) throw new Error(`not a sound: expected ${FORMATS}`);
  return keep(await toWav(blob), name, unstored);
}

// "1:05"
export const inTime = (seconds) =>
  `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;

export const inWords = ({ name, seconds }) => `${name} (${inTime(seconds)})`;

// The sounds of a message, each with its player.
export function soundViews(node) {
  if (!node.sounds?.length) return [];
  const items = node.sounds.map((sound) => {
    const player = el("audio", { controls: true, preload: "none", "aria-label": sound.name });
    load(player, sound);
    return el("li", {}, el("span", {}, inWords(sound)), player);
  });
  return [el("ul", { class: "sounds", "aria-label": "Sounds" }, ...items)];
}

async function load(player, sound) {
  const blob = await store.picture(sound.id);
  if (blob) player.src = URL.createObjectURL(blob);
  else player.replaceWith("no longer stored in this browser");
}

// -- the microphone -------------------------------------------------------------------------------

// Browsers have one only where the page comes from this machine, or over HTTPS.
export const canRecord = () =>
  Boolean(navigator.mediaDevices?.getUserMedia && window.MediaRecorder);

// Records from the moment that it is made. `ended(file)` gets what was recorded, a File, once it is
// stopped, by `stop()` or at the limit; `failed(error)` is called where nothing can be recorded.
export class Recorder {
  constructor({ ended, failed, ticked }) {
    Object.assign(this, { ended, failed, ticked });
    this._stopped = false;
    this._start();
  }

  stop() {
    this._stopped = true;
    if (this._recorder?.state === "recording") this._recorder.stop();
  }

  async _start() {
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio: true });
      this._recorder = new MediaRecorder(stream);
    } catch (error) {
      for (const track of stream?.getTracks() ?? []) track.stop();
      return this.failed(new Error(`the microphone cannot be used: ${error.message}`));
    }
    const parts = [];
    const began = performance.now();
    const clock = setInterval(() => {
      const seconds = (performance.now() - began) / 1000;
      this.ticked(inTime(seconds));
      if (seconds >= MOST_SECONDS - 1) this.stop();
    }, 250);
    this._recorder.ondataavailable = ({ data }) => parts.push(data);
    this._recorder.onstop = () => {
      clearInterval(clock);
      for (const track of stream.getTracks()) track.stop();
      this.ended(new File(parts, "recording", { type: this._recorder.mimeType }));
    };
    this._recorder.start();
    if (this._stopped) this.stop(); // before the microphone was there
  }
}
