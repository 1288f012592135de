// How rows are put into one or more indexes (targets), in three kernels on one stream, one batch at a time over all streams,
// while no look-up runs; each index is the target of a batch once at most:
//
//   note_last   of equal keys of a target, the last is the one that counts
//   claim       each key takes a slot: a free one, or where there is none, that of the row that was hit least
//   write_rows  fill the slots, then finish their claims: the tag comes last
//
// An update takes a free slot of its bucket if there is one, and frees the old one once the new one can be found, so that
// the key can be found at every moment; one slot of each bucket is kept from inserts for that. In a bucket without a free
// slot the row is away until it can be found again.

constexpr u8 FIRST_MARK = 1;

// The target whose keys the warp has, of which one is at this position. All lanes must take part.
__device__ __forceinline__ Target target_of(const Batch& batch, u32 position) {
  if (batch.num_targets == 1) return batch.targets[0];
  const u32 lane = threadIdx.x % LANES;
  const bool begun = lane < batch.num_targets && batch.targets[lane].first <= position;
  return batch.targets[LANES - 1 - __clz(__ballot_sync(ALL_LANES, begun))];
}

extern "C" __global__ void note_last(const __grid_constant__ Batch batch) {
  // From the last position on: what is noted first then rarely has to be replaced.
  const u32 position = batch.num_positions - 1 - (blockIdx.x * blockDim.x + threadIdx.x);
  if (position >= batch.num_positions) return;
  const Target target = target_of(batch, position);
  const u32 i = position - target.first;
  if (i >= target.num_keys) return;
  const i64 key = target.keys[i];
  u32 place = ((u32)(hash_key(key) >> 16) + target.first) & batch.seen_mask;
  for (;;) {
    u32 found = *(volatile u32*)(batch.seen + place);
    if (found == 0) {
      found = atomicCAS(batch.seen + place, 0, position + 1);
      if (found == 0) break;
    }
    const u32 other = found - 1 - target.first;
    if (other < target.num_keys && target.keys[other] == key) {
      if (found < position + 1) atomicMax(batch.seen + place, position + 1);
      break;
    }
    place = (place + 1) & batch.seen_mask;
  }
  batch.places[position] = place;
}

__device__ __forceinline__ bool swap_tag(u8* bucket, int slot, u32 expected, u32 wanted) {
  u32* word = reinterpret_cast<u32*>(bucket) + slot / 4;
  const int shift = 8 * (slot % 4);
  u32 found = *(volatile u32*)word;
  while ((found >> shift & 255) == expected) {
    const u32 before = found;
    found = atomicCAS(word, before, (before & ~(255u << shift)) | wanted << shift);
    if (found == before) return true;
  }
  return false;
}

// The first of some slots from a given one on, round the end.
__device__ __forceinline__ int first_from(u64 slots, u32 start) {
  const u64 later = slots & (ALL_SLOTS << start);
  return __ffsll(later != 0 ? later : slots) - 1;
}

// Takes a free slot, if more than `reserved` are free; -1: none.
__device__ __forceinline__ int take_free(u8* bucket, int reserved, u32 start) {
  for (;;) {
    const u64 free_slots = match_slots(load_bucket(bucket), FREE);
    if (__popcll(free_slots) <= reserved) return -1;
    const int slot = first_from(free_slots, start);
    if (swap_tag(bucket, slot, FREE, BUSY)) return slot;
  }
}

// Four bytes of 0 or 1 from four bits.
__device__ __forceinline__ u32 spread(u32 bits) { return ((bits & 15) * 0x00204081u) & 0x01010101u; }

// A clock whose hand begins anywhere: takes the first row with the lowest mark, and lowers the marks that it passes.
__device__ __forceinline__ int take_evicted(u8* bucket, u8* marks, u32 start) {
  for (int attempt = 0; attempt < 8; ++attempt) {
    const Bucket tags = load_bucket(bucket), marked = load_bucket(marks);
    const u64 live = ALL_SLOTS & ~(match_slots(tags, FREE) | match_slots(tags, BUSY));
    if (live == 0) return -1;
    u64 candidates = 0;
    for (u32 mark = 0; mark < MAX_MARK && candidates == 0; ++mark) candidates = match_slots(marked, mark) & live;
    const int slot = first_from(candidates != 0 ? candidates : live, start);
    const u32 word = reinterpret_cast<const u32*>(&tags)[slot / 4];
    if (!swap_tag(bucket, slot, word >> (8 * (slot % 4)) & 255, BUSY)) continue;
    const u64 before = (1ull << slot) - 1, from = ALL_SLOTS << start;
    const u64 passed = (u32)slot >= start ? before & from : before | from;
    for (int i = 0; i < BUCKET_BYTES / 4; ++i) {
      u32* mark = reinterpret_cast<u32*>(marks) + i;
      *mark = __vsubus4(*mark, spread((u32)(passed >> (4 * i))));
    }
    return slot;
  }
  return -1;
}

__device__ __forceinline__ void count(u64* events, Event event, bool happened) {
  const u32 active = __activemask();
  const u32 those = __ballot_sync(active, happened);
  if (those != 0 && threadIdx.x % LANES == __ffs(active) - 1) atomicAdd(events + event, (u64)__popc(those));
}

extern "C" __global__ void claim(const __grid_constant__ Batch batch) {
  const u32 position = blockIdx.x * blockDim.x + threadIdx.x;
  if (position >= batch.num_positions) return;
  const Target target = target_of(batch, position);
  const Index& index = target.index;
  const u32 i = position - target.first;
  if (i >= target.num_keys) return;
  Claim taken = {0, 0};
  bool inserted = false, updated = false, evicted = false, refused = false;
  if (batch.seen[batch.places[position]] == position + 1) {
    const i64 key = target.keys[i];
    const Place place = place_of(index, key);
    const u32 tag = place.tag, start = tag * SLOTS >> 8;
    const i64 slot = find_slot(index, key, place), number = place.bucket;
    u8* bucket = index.tags + number * BUCKET_BYTES;
    if (slot >= 0) {
      const int fresh = take_free(bucket, 0, start);
      updated = fresh >= 0 || swap_tag(bucket, (int)(slot - number * SLOTS), tag, BUSY);
      if (fresh >= 0) taken = {(u32)(number * SLOTS + fresh) + 1, (u32)slot + 1};
      else if (updated) taken = {(u32)slot + 1, 0};
    }
    if (!updated && batch.may_insert) {
      int free_slot = take_free(bucket, 1, start);
      if (free_slot < 0 && batch.may_evict) {
        free_slot = take_evicted(bucket, index.marks + number * BUCKET_BYTES, start);
        evicted = free_slot >= 0;
      }
      inserted = free_slot >= 0;
      refused = !inserted;
      if (inserted) taken.slot = (u32)(number * SLOTS + free_slot) + 1;
      if (inserted && !place.alone) *index.others = 1;
    }
  }
  batch.claims[position] = taken;
  count(target.events, INSERTS, inserted);
  count(target.events, UPDATES, updated);
  count(target.events, EVICTIONS, evicted);
  count(target.events, REFUSED, refused);
}

// A key that was claimed is there from now on, and no longer where it was.
__device__ __forceinline__ void finish_claim(const Index& index, u64* events, i64 key, Claim claim) {
  const u64 slot = claim.slot - 1;
  const u32 tag = place_of(index, key).tag;
  index.tags[slot / SLOTS * BUCKET_BYTES + slot % SLOTS] = (u8)tag;
  if (claim.old == 0) return;
  const u32 old = claim.old - 1;
  u8* bucket = index.tags + (u64)(old / SLOTS) * BUCKET_BYTES;
  const bool ours = *(volatile u8*)(bucket + old % SLOTS) == tag;
  __threadfence();
  if (ours && *(volatile i64*)(index.keys + old) == key && swap_tag(bucket, old % SLOTS, tag, FREE)) return;
  // It was evicted in this batch: what began as an update has become an insert.
  atomicAdd(events + INSERTS, 1ull);
  atomicAdd(events + UPDATES, ~0ull);
}

// A warp writes 32 rows.
extern "C" __global__ void write_rows(const __grid_constant__ Batch batch) {
  const u32 position = blockIdx.x * blockDim.x + threadIdx.x;
  if (position >= batch.num_positions) return;
  const Target target = target_of(batch, position);
  const Index& index = target.index;
  const Rows& rows = target.rows;
  const u32 i = position - target.first, num_keys = min(target.num_keys - (i - threadIdx.x % LANES), (u32)LANES);
  const u32 dim = (u32)(rows.row_bytes / sizeof(float));
  const Claim claim = i < target.num_keys ? batch.claims[position] : Claim{0, 0};
  const u8* vector = reinterpret_cast<const u8*>(target.vectors + (u64)i * dim);
  u8* row = claim.slot != 0 ? rows.vectors + (u64)(claim.slot - 1) * rows.row_bytes : nullptr;
  if (rows.wide && (reinterpret_cast<u64>(target.vectors) & 15) == 0)
    copy_rows<FLOAT32, true>(vector, {row, false}, dim, num_keys);
  else copy_rows<FLOAT32, false>(vector, {row, false}, dim, num_keys);
  const i64 key = claim.slot != 0 ? target.keys[i] : 0;
  if (claim.slot != 0) {
    const u64 slot = claim.slot - 1;
    index.keys[slot] = key;
    index.marks[slot / SLOTS * BUCKET_BYTES + slot % SLOTS] = FIRST_MARK;
  }
  __threadfence();
  __syncwarp();
  if (claim.slot != 0) finish_claim(index, target.events, key, claim);
}

// For one index over rows that lie elsewhere: key i is row first + i.
extern "C" __global__ void write_numbers(const __grid_constant__ Batch batch, u32* numbers, u32 first) {
  const Target target = batch.targets[0];
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= target.num_keys || batch.claims[i].slot == 0) return;
  const u32 slot = batch.claims[i].slot - 1;
  target.index.keys[slot] = target.keys[i];
  numbers[slot] = first + i;
  __threadfence();
  finish_claim(target.index, target.events, target.keys[i], batch.claims[i]);
}

extern "C" __global__ void erase(Index index, u64* events, const i64* keys, u32 n) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const Place place = place_of(index, keys[i]);
  const i64 slot = find_slot(index, keys[i], place);
  const bool erased =
      slot >= 0 && swap_tag(index.tags + place.bucket * BUCKET_BYTES, (int)(slot - place.bucket * SLOTS), place.tag, FREE);
  count(events, ERASES, erased);
}

// For an index over rows that change: these keys were deleted. Their rows hold the default vector.
extern "C" __global__ void mark_deleted(Index index, const i64* keys, u32 n) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const Place place = place_of(index, keys[i]);
  const i64 slot = find_slot(index, keys[i], place);
  if (slot >= 0) index.marks[line_place(place, slot)] = DELETED_MARK;
}
