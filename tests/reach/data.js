// As data.py, for Node.
const crypto = require('crypto');
const MIB = Number(process.argv[2]);
const records = JSON.parse('[' + Array.from({ length: MIB * 1000 }, (_, n) =>
  `{"id":${n},"name":"name ${n}","text":"${'the same words in each process '.repeat(8)}${n}"}`).join(',') + ']');
const buffers = Array.from({ length: MIB * 8 }, (_, n) => Buffer.alloc(65536, `line ${n}, as from one file on disk; `));

function work(turn) {
  const digest = crypto.createHash('sha256');
  let total = 0;
  for (const buffer of buffers) digest.update(buffer);
  for (const record of records) total += record.id + record.name.length + record.text.charCodeAt(record.id % 200);
  // Garbage, as programs make it.
  const copies = records.slice(0, 20000).map((record) => ({ ...record, turn }));
  return `${digest.digest('hex').slice(0, 16)}-${total}-${copies.length}`;
}

let turn = 0;
console.log('ready');
require('readline').createInterface({ input: process.stdin }).on('line', (line) => {
  if (line.trim() !== 'work') process.exit(0);
  const begun = process.hrtime.bigint();
  const answer = work(turn++);
  console.log(`${answer} ${(process.hrtime.bigint() - begun) / 1000000n}`);
}).on('close', () => process.exit(0));
