// Records that describe tables and requests; kernels/cuda/records.py and kernels/records.py declare the same fields.

using u8 = unsigned char;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

constexpr int LANES = 32;
constexpr u32 ALL_LANES = 0xffffffffu;
constexpr int MAX_INLINE_SEGMENTS = 32;
constexpr int MAX_BAGS_PER_TILE = 8;
constexpr int MAX_TARGETS = 32;
constexpr int MAX_SHARDS = 8;
constexpr int COUNT_STRIDE = 16;  // from one count in host memory to the next: so each has a line of its own
constexpr u32 NOT_ORDERED = 0xffffffffu;

// GPUs that a sharded table lies on. A constant, so that look-ups in tables of one GPU do nothing for it.
#ifndef NUM_SHARDS
#define NUM_SHARDS 1
#endif
// 1: rows change while they are looked up. The cache holds every row that has changed, row numbers counted from the start,
// and the mark of a slot says whether the row was deleted.
#ifndef ROWS_CHANGE
#define ROWS_CHANGE 0
#endif
// 1: rows may be stored in float16 or int8. Look-ups of rows in float32 alone need fewer registers.
#ifndef NARROW_ROWS
#define NARROW_ROWS 0
#endif
// 1: segments may have outputs in float16.
#ifndef NARROW_OUTPUTS
#define NARROW_OUTPUTS 0
#endif
// Whether the keys of some segments are taken in an order of their own, see order.cu. A constant too.
#ifndef IN_ORDER
#define IN_ORDER 0
#endif
static_assert(NUM_SHARDS <= MAX_SHARDS, "a table record has room for fewer shards");

enum VectorCode { FLOAT32 = 0, FLOAT16 = 1, INT8 = 2 };
enum PoolingCode { NONE = 0, SUM = 1, MEAN = 2, MAX = 3 };
enum Event { INSERTS = 0, UPDATES = 1, EVICTIONS = 2, ERASES = 3, MISSES = 4, UNKNOWN = 5, REFUSED = 6 };

// Where keys are: see index.cuh.
struct alignas(16) Index {
  u8* tags;
  i64* keys;
  u8* marks;  // how much a slot's row was hit lately; null: nothing is ever evicted
  u32* others;  // 1: keys were put in that may share a bucket and a tag with another
  i64 num_buckets;  // 0: holds no key
  i64 first_key;  // the lowest that has a bucket and a tag of its own
};

// Rows by slot or row number.
struct alignas(16) Rows {
  u8* vectors;
  i64 row_bytes;
  i64 code;  // VectorCode
  i64 wide;  // 1 where four elements of a row can be loaded at once, wherever they are
};

// What look-ups in a sharded table read, by samples.
struct Samples {
  u64 num_keys;     // noted in `keys`, or more; once that is full, nothing is counted
  u64 copies_read;  // local copies of rows of other GPUs
  i64* keys;        // of rows that were read from other GPUs
};

struct alignas(16) Table {
  Index cached;  // slot i of the index is row i of cached_rows
  Rows cached_rows;
  Index base;  // of rows below the cache, in device memory or pinned host memory; base_numbers[slot] is the row
  Rows base_rows;
  u32* base_numbers;
  i64 num_base_rows;
  i64 num_row_numbers;  // keys are the numbers of this many rows, negative ones from the end; 0: keys are stored
  i64 dim;
  float* default_vector;  // the answer for an unknown key; null: leave the output as it is
  u64* events;
  u8* shards[MAX_SHARDS];  // where the base rows begin on each of NUM_SHARDS GPUs, in turn; null: all are in base_rows
  Samples* samples;  // of sharded tables; null: none are taken
  u64 max_sampled;   // keys that there is room for in these
};

struct Segment {
  i64 table;
  const u8* keys;
  i64 key_bytes;
  i64 row_stride;
  i64 key_stride;
  i64 num_rows;
  i64 keys_per_row;
  const i64* begins;
  const i64* ends;
  const float* weights;
  i64 pooling;
  u8* output;
  i64 output_stride;
  i64 output_code;  // FLOAT32 or FLOAT16
};

// A key in the order in which a look-up takes them.
struct alignas(16) Turn {
  i64 key;
  u32 place;  // among the keys of all segments that are taken in order
};

struct Request {
  const Table* tables;
  const Segment* segments;  // null: `few_segments` and `few_tiles` hold them
  const u32* first_tiles;
  u32* missing_bits;       // one word per tile that is not pooled, 0 before, a bit per key that has no row; null: not noted
  u64* num_unknown;        // per segment, keys that have no row, in host memory, COUNT_STRIDE apart; null: not counted
  u32* unknown_sums;       // per segment, what is still to be added to num_unknown; 0 before and after each launch
  const Turn* order;       // of the keys of some segments
  u32 num_segments;
  u32 num_tiles;
  u32 keys_per_tile;
  u32 seed;
  u32 num_ordered_blocks;  // the first blocks, which take the keys of segments in order; the others take the other segments
  u32 few_tiles[MAX_INLINE_SEGMENTS + 1];
  u32 few_begins[MAX_INLINE_SEGMENTS];  // where each segment's keys begin in `order`; NOT_ORDERED: as they come
  Segment few_segments[MAX_INLINE_SEGMENTS];
};

// One of the vectors, in float32, that are copied to the outputs of a look-up.
struct VectorCopy {
  const float* vector;
  u8* output;
  i64 dim;
  i64 code;  // of the output: FLOAT32 or FLOAT16
};

// The slot that a key takes.
struct Claim {
  u32 slot;  // plus 1; 0: none
  u32 old;   // plus 1; slot that gives way when the new one can be found; 0: none
};

// Rows to write into one index. The keys of all targets have positions, from 0 on.
struct alignas(16) Target {
  Index index;
  Rows rows;  // one for each slot, float32
  u64* events;
  const i64* keys;
  const float* vectors;  // [num_keys, dim of the rows], contiguous
  u32 num_keys;
  u32 first;  // position of the first key: a multiple of LANES, so that no warp has keys of two targets
};

struct Batch {
  u32* seen;  // a hash set of positions (plus 1), cleared, of a power of two of places, above num_positions
  Claim* claims;  // [num_positions]
  u32* places;    // [num_positions], of each key in `seen`
  u32 seen_mask;
  u32 num_targets;
  u32 num_positions;  // a multiple of LANES
  u32 may_insert;  // 1: keys that are not there take a slot
  u32 may_evict;   // 1: also where that costs another row its slot
  Target targets[MAX_TARGETS];
};
