// The packed blocks of the page. The index is unpacked at once, details when they are looked at.

const byId = (id) => document.getElementById(id);

async function unpack(id) {
  const packed = atob(byId(id).textContent);
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  const gzip = new DecompressionStream("gzip");
  const writer = gzip.writable.getWriter();
  writer.write(bytes);
  writer.close();
  return JSON.parse(await new Response(gzip.readable).text());
}

// Numbers that JSON does not have are texts.
const numberOf = (value) => (value === null || value === undefined ? null : Number(value));

class Rollouts {
  static async open() {
    return new Rollouts(await unpack("index-0"));
  }

  constructor(index) {
    Object.assign(this, index);
    this.count = index.columns.run?.length ?? 0;
    for (const name of ["reward", "advantage", "right"]) {
      if (this.count) this.columns[name] = this.columns[name].map(numberOf);
    }
    this.blocks = new Map();
    this.imageBlocks = new Map();
    this.ofSample = new Map();
    for (let i = 0; i < this.count; i++) {
      const id = this.sample(i).id;
      if (!this.ofSample.has(id)) this.ofSample.set(id, []);
      this.ofSample.get(id).push(i);
    }
  }

  get(name, i) {
    return this.columns[name][i];
  }

  sample(i) {
    return this.samples[this.columns.sample[i]];
  }

  // What every reward component was multiplied by; undefined where it is not known.
  factors(i) {
    return this.runs[this.get("run", i)].factors[this.get("step", i)];
  }

  // All rollouts of the same sample, over runs and steps.
  alike(i) {
    return this.ofSample.get(this.sample(i).id);
  }

  group(i) {
    return this.alike(i).filter((other) =>
      ["run", "step", "group"].every((name) => this.get(name, other) === this.get(name, i)));
  }

  block(number) {
    if (!this.blocks.has(number)) {
      // What was looked at long ago is unpacked anew.
      if (this.blocks.size > 32) this.blocks.delete(this.blocks.keys().next().value);
      this.blocks.set(number, unpack(`details-${number}`));
    }
    return this.blocks.get(number);
  }

  async detail(i) {
    let number = this.firsts.length - 1;
    while (this.firsts[number] > i) number--;
    return (await this.block(number))[i - this.firsts[number]];
  }

  // {src, width, height}, or {reason} where there is no image.
  image(i) {
    const number = Math.floor(i / this.imagesOfABlock);
    if (!this.imageBlocks.has(number)) {
      if (this.imageBlocks.size > 64) {
        this.imageBlocks.delete(this.imageBlocks.keys().next().value);
      }
      this.imageBlocks.set(number, byId(`images-${number}`).textContent.split("\n"));
    }
    const line = this.imageBlocks.get(number)[i % this.imagesOfABlock];
    if (line.startsWith("!")) return {reason: line.slice(1)};
    const [size, type, text] = line.split(";");
    const [width, height] = size.split("x").map(Number);
    return {src: `data:image/${type};base64,${text}`, width, height};
  }
}
