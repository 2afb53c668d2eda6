// Pictures of messages: recognised by their content, scaled down, kept beside the conversations,
// shown. A conversation holds {id, name, alt, width, height} of each; the store has its bytes.

import { el } from "./element.js";
import * as sounds from "./sounds.js";
import * as store from "./store.js";
import { newId, path } from "./talk.js";

export const MOST_PICTURES = 32; // the server's limit for one request
const MOST_BYTES = 100_000_000; // of a file before it is scaled down
const MOST_PIXELS = 64_000_000; // of a picture before it is scaled down: width times height
const MOST_RATIO = 200; // longer side by shorter side: the server's limit
const MOST_SIDE = 2048; // pixels that the longer side is scaled down to
const MOST_PNG_BYTES = 4 << 20; // a request has room for a few pictures only
const JPEG_QUALITY = 0.9;
const SHOWN_SIDE = 240; // pixels of the longer side in a conversation

export const FORMATS = "PNG, JPEG, WebP, GIF, BMP or AVIF";
// First bytes of PNG, JPEG, GIF, WebP, BMP (whose header tells its own length), TIFF, and AVIF or
// HEIC. Not every browser reads the last three.
const SIGNATURE = new RegExp(
  [
    "\\x89PNG\\r\\n\\x1a\\n",
    "\\xff\\xd8\\xff",
    "GIF8[79]a",
    "RIFF.{4}WEBP",
    "BM.{12}[\\x0c\\x28\\x34\\x38\\x40\\x6c\\x7c]\\0\\0\\0",
    "II\\*\\0|MM\\0\\*",
    ".{4}ftyp(?:avif|avis|heic|heix|mif1|msf1)",
  ]
    .map((each) => `^(?:${each})`)
    .join("|"),
  "s",
);

// Whether a file is a picture, whatever its name says.
export async function isPicture(file) {
  const bytes = new Uint8Array(await file.slice(0, 32).arrayBuffer());
  return SIGNATURE.test(String.fromCharCode(...bytes));
}

// A picture's file as it is kept and sent, {blob, width, height}: upright, at most MOST_SIDE pixels
// a side, without the file's metadata. Throws where the file cannot be read, or is too large.
export async function scaleDown(file) {
  if (file.size > MOST_BYTES)
    throw new Error(`larger than ${MOST_BYTES / 1e6} MB, the limit for a picture`);
  const given = await sizeOf(file); // before its pixels are decoded
  check(given);
  // Unlike an element, a bitmap is refused where the file ends early.
  const bitmap = await createImageBitmap(file).catch(() => null);
  if (!bitmap) throw unreadable();
  const scale = Math.min(1, MOST_SIDE / Math.max(bitmap.width, bitmap.height));
  const width = Math.max(1, Math.round(bitmap.width * scale));
  const height = Math.max(1, Math.round(bitmap.height * scale));
  const canvas = drawn(bitmap, width, height);
  bitmap.close();
  return { blob: await encoded(canvas), width, height };
}

const unreadable = () =>
  new Error("the picture is damaged, or of a format that this browser cannot read");

// A picture's {width, height}, turned upright. Browsers know them from the file's first bytes.
async function sizeOf(blob) {
  const image = new Image();
  image.src = URL.createObjectURL(blob);
  try {
    await new Promise((resolve, reject) => {
      image.onload = resolve;
      image.onerror = () => reject(unreadable());
    });
    return { width: image.naturalWidth, height: image.naturalHeight };
  } finally {
    URL.revokeObjectURL(image.src);
  }
}

function check({ width, height }) {
  const size = `${width} × ${height} pixels`;
  if (width * height > MOST_PIXELS)
    throw new Error(`${size}: the limit is ${MOST_PIXELS / 1e6} million`);
  if (Math.max(width, height) > MOST_RATIO * Math.min(width, height))
    throw new Error(`${size}: one side is more than ${MOST_RATIO} times the other`);
}

// Draws a picture of this size. Browsers smooth over few pixels: one that is much larger is halved
// first, so that thin lines and small letters are not lost.
function drawn(source, width, height) {
  let from = source;
  while (from.width > 2 * width)
    from = onCanvas(from, Math.ceil(from.width / 2), Math.ceil(from.height / 2));
  return onCanvas(from, width, height);
}

function onCanvas(source, width, height) {
  const canvas = el("canvas", { width, height });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  context.drawImage(source, 0, 0, width, height);
  return canvas;
}

// JPEG, or PNG where some of the picture is transparent.
async function encoded(canvas) {
  if (isTransparent(canvas)) {
    const png = await toBlob(canvas, "image/png");
    if (png.size <= MOST_PNG_BYTES) return png;
    const context = canvas.getContext("2d"); // on white, as the server shows it to the model
    context.globalCompositeOperation = "destination-over";
    context.fillStyle = "#ffffff";
    context.fillRect(0, 0, canvas.width, canvas.height);
  }
  return toBlob(canvas, "image/jpeg");
}

function isTransparent(canvas) {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  for (let i = 3; i < data.length; i += 4) if (data[i] < 255) return true;
  return false;
}

async function toBlob(canvas, type) {
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, type, JPEG_QUALITY));
  if (!blob) throw new Error("this browser could not scale the picture");
  return blob;
}

// -- kept and shown -------------------------------------------------------------------------------

const urls = new Map(); // of pictures that were shown: id to the address that elements have

// Keeps a picture that was scaled down, and returns what a conversation holds of it. Where the
// browser stores no more, `unstored(error)` is called, and the picture is there until a reload.
export async function keep({ blob, width, height }, name, unstored = () => {}) {
  const picture = { id: newId(), name, alt: name, width, height };
  await store.putPicture(picture.id, blob).catch(unstored);
  return picture;
}

// Forgets pictures that no conversation has any more.
export async function drop(pictures) {
  for (const { id } of pictures) {
    URL.revokeObjectURL(urls.get(id));
    urls.delete(id);
  }
  await store.dropPictures(pictures.map(({ id }) => id));
}

async function urlOf({ id }) {
  if (!urls.has(id)) {
    const blob = await store.picture(id);
    if (!blob) return null;
    if (!urls.has(id)) urls.set(id, URL.createObjectURL(blob));
  }
  return urls.get(id);
}

export const altOf = ({ alt, name }) => alt || name || "Picture";

// A picture as an element whose longer side has `side` pixels; the place is there before the bytes.
export function imageOf(picture, side) {
  const scale = Math.min(1, side / Math.max(picture.width, picture.height));
  const image = el("img", {
    alt: altOf(picture),
    src: urls.get(picture.id),
    width: Math.max(1, Math.round(picture.width * scale)),
    height: Math.max(1, Math.round(picture.height * scale)),
  });
  if (!urls.has(picture.id)) load(image, picture);
  return image;
}

async function load(image, picture) {
  const url = await urlOf(picture);
  if (url) image.src = url;
  else image.alt = `${altOf(picture)} (no longer stored in this browser)`;
}

// The pictures of a message. `enlarge(picture)` is called when one is pressed.
export function pictureViews(node, enlarge) {
  if (!node.pictures?.length) return [];
  const items = node.pictures.map((picture) => {
    const attributes = { type: "button", title: "Enlarge", onclick: () => enlarge(picture) };
    return el("li", {}, el("button", attributes, imageOf(picture, SHOWN_SIDE)));
  });
  return [el("ul", { class: "pictures", "aria-label": "Pictures" }, ...items)];
}

// -- sent, written to files and read from them ----------------------------------------------------

// The pictures of messages, and their sounds, which are kept and sent in the same way.
export const heldBy = (nodes) =>
  nodes.flatMap((node) => [...(node.pictures ?? []), ...(node.sounds ?? [])]);
export const allOf = (talk) => heldBy(Object.values(talk.nodes));
export const shownIn = (talk) => heldBy(path(talk));

// Those of these pictures whose bytes are there.
export async function stored(pictures) {
  const blobs = await Promise.all(pictures.map(({ id }) => store.picture(id)));
  return pictures.filter((_, i) => blobs[i]);
}

// data: URLs of pictures and sounds, by their ids. One that is not stored any more is left out.
export async function dataUrls(pictures) {
  const found = new Map();
  for (const { id } of pictures) {
    const blob = found.has(id) ? null : await store.picture(id);
    if (blob) found.set(id, await dataUrl(blob));
  }
  return found;
}

const dataUrl = (blob) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });

// A conversation as it is written to a file, with the bytes of its pictures and sounds.
export async function packed(talk) {
  const found = await dataUrls(allOf(talk));
  return found.size ? { ...talk, pictures: Object.fromEntries(found) } : talk;
}

// Keeps the pictures and sounds of a conversation that was read from a file: each has its bytes as
// `url`. Returns how many are left out, since they cannot be read. `unstored` is as in `keep`.
export async function unpack(talk, unstored) {
  const kept = new Map(); // one may be in several versions of a message
  let n_left_out = 0;
  const unpacked = async (held, read) => {
    const found = [];
    for (const { id, url, name, alt } of held ?? []) {
      if (!kept.has(id)) kept.set(id, await read(url, name, unstored).catch(() => null));
      if (kept.get(id)) found.push(alt === undefined ? kept.get(id) : { ...kept.get(id), alt });
      else n_left_out++;
    }
    return found;
  };
  for (const node of Object.values(talk.nodes)) {
    node.pictures = await unpacked(node.pictures, fromUrl);
    node.sounds = await unpacked(node.sounds, sounds.fromUrl);
  }
  return n_left_out;
}

async function fromUrl(url, name, unstored) {
  const [, type, base64] = /^data:(image\/[a-z]+);base64,(.+)$/s.exec(url);
  const bytes = Uint8Array.from(atob(base64), (each) => each.charCodeAt(0));
  const blob = new Blob([bytes], { type });
  if (!(await isPicture(blob))) throw unreadable();
  const size = await sizeOf(blob);
  check(size);
  // A picture of this page's is kept as it is: JPEG loses something each time that it is written.
  const ours = Math.max(size.width, size.height) <= MOST_SIDE && /jpeg|png/.test(type);
  return keep(ours ? { blob, ...size } : await scaleDown(blob), name, unstored);
}
