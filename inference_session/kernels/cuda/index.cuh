// The hash index on the device: where a key is found. tests/testing/cuda_model.py is its model in NumPy.
//
// A bucket is 64 bytes: 62 tags, then two that say nothing. Slot s of bucket b is row 62 b + s of `keys`. A tag of 1 to 254 says
// that the slot holds a key of that tag, 0 that it is free, 255 that a writer is filling it. A key has one bucket: where
// that is full, the key takes another's slot or none, so that a look-up is never longer than one bucket.
// Look-ups and writes are launches of their own, one after the other. A look-up reads by way of the first-level cache
// (`QUIET`), which takes the hot keys of a skewed request off the few slices of the second level that hold them; a write does
// not, as other multiprocessors' writes do not reach that cache.
//
// Most keys are numbers from somewhere on, with few gaps: those of [first_key, first_key + 2^k), for the largest k such that
// 2^k is at most NUM_TAGS for each bucket. They are mixed one to one, so that each has a bucket and a tag that no other one of
// them has. As long as an index has no other keys, a tag says which key a slot holds, and the key itself is not read.

constexpr int SLOTS = 62;
constexpr int BUCKET_BYTES = 64;
constexpr u64 ALL_SLOTS = (1ull << SLOTS) - 1;
constexpr u32 FREE = 0, BUSY = 255, NUM_TAGS = 254;

__device__ __forceinline__ u64 hash_key(i64 key) {
  u64 mixed = (u64)key;
  mixed = (mixed ^ (mixed >> 33)) * 0xff51afd7ed558ccdull;
  mixed = (mixed ^ (mixed >> 33)) * 0xc4ceb9fe1a85ec53ull;
  return mixed ^ (mixed >> 33);
}

__device__ __forceinline__ i64 bucket_of(u64 hashed, i64 num_buckets) {
  return (i64)(((hashed >> 32) * (u64)num_buckets) >> 32);
}

__device__ __forceinline__ u32 tag_of(u64 hashed) { return 1 + (((u32)hashed & 0xffff) * NUM_TAGS >> 16); }

// Where a key is, if it is anywhere.
struct Place {
  i64 bucket;
  u32 tag;
  bool alone;  // no other key with `alone` has this bucket and this tag
};

__device__ __forceinline__ Place place_of(const Index& index, i64 key) {
  const u64 num_buckets = (u64)index.num_buckets, number = (u64)key - (u64)index.first_key;
  const u32 bits = 63 - __clzll(num_buckets * NUM_TAGS);
  if (number >> bits != 0) {
    const u64 hashed = hash_key(key);
    return {bucket_of(hashed, index.num_buckets), tag_of(hashed), false};
  }
  const u64 mask = (1ull << bits) - 1;
  const u32 half = (bits + 1) / 2;
  u64 mixed = ((number ^ (number >> half)) * 0xff51afd7ed558ccdull) & mask;
  mixed = ((mixed ^ (mixed >> half)) * 0xc4ceb9fe1a85ec53ull) & mask;
  mixed ^= mixed >> half;
  // Of the numbers of a bucket, the remainders are at least num_buckets apart, and so at least 2^k / NUM_TAGS.
  const u64 product = mixed * num_buckets;
  return {(i64)(product >> bits), 1 + (u32)((product & mask) * NUM_TAGS >> bits), true};
}

// Where the tag of a slot in a key's bucket is among all tags, and its mark among all marks.
__device__ __forceinline__ i64 line_place(const Place& place, i64 slot) { return slot + (BUCKET_BYTES - SLOTS) * place.bucket; }

struct Bucket {
  uint4 words[4];
};

// The tags are asked to stay in the second-level cache, where rows that stream past would push them out. Not so the keys: of a
// large table they would push out the tags.
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ u64 keeping_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

template <bool QUIET>
__device__ __forceinline__ uint4 load_kept(const void* address) {
  const u64 policy = keeping_policy();
  uint4 value;
  if constexpr (QUIET) {
    asm volatile("ld.global.ca.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address), "l"(policy));
  } else {
    asm volatile("ld.global.cg.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address), "l"(policy));
  }
  return value;
}
#else
template <bool QUIET>
__device__ __forceinline__ uint4 load_kept(const void* address) {
  return __ldcg((const uint4*)address);
}
#endif

template <bool QUIET = false>
__device__ __forceinline__ Bucket load_bucket(const u8* bucket) {
  return {load_kept<QUIET>(bucket), load_kept<QUIET>(bucket + 16), load_kept<QUIET>(bucket + 32),
          load_kept<QUIET>(bucket + 48)};
}

// Four bits, one per byte of a word that equals that of `pattern`.
__device__ __forceinline__ u32 match_word(u32 word, u32 pattern) {
  const u32 differing = word ^ pattern;
  const u32 zero = ~((((differing & 0x7f7f7f7fu) + 0x7f7f7f7fu) | differing) | 0x7f7f7f7fu);
  return ((zero >> 7) * 0x10204080u) >> 28;
}

__device__ __forceinline__ u32 match_words(const uint4& words, u32 pattern) {
  return match_word(words.x, pattern) | match_word(words.y, pattern) << 4 | match_word(words.z, pattern) << 8 |
         match_word(words.w, pattern) << 12;
}

// One bit per slot whose tag is the given one.
__device__ __forceinline__ u64 match_slots(const Bucket& bucket, u32 tag) {
  const u32 pattern = tag * 0x01010101u;
  const u32 low = match_words(bucket.words[0], pattern) | match_words(bucket.words[1], pattern) << 16;
  const u32 high = match_words(bucket.words[2], pattern) | match_words(bucket.words[3], pattern) << 16;
  return ((u64)high << 32 | low) & ALL_SLOTS;
}

template <bool QUIET>
__device__ __forceinline__ i64 load_held_key(const i64* key) {
  return QUIET ? __ldca(key) : __ldcg(key);
}

// Whether the index has keys that may share a bucket and a tag with another.
template <bool QUIET>
__device__ __forceinline__ bool has_others(const Index& index) {
  return (QUIET ? __ldg(index.others) : *(volatile u32*)index.others) != 0;
}

// The slot of a key, counted over all buckets; -1: it is not there. Two candidates are read at once: more are rare.
template <bool QUIET = false>
__device__ __forceinline__ i64 find_slot(const Index& index, i64 key, const Place& place) {
  const bool exact = place.alone && !has_others<QUIET>(index);
  u64 matches = match_slots(load_bucket<QUIET>(index.tags + place.bucket * BUCKET_BYTES), place.tag);
  const i64 begin = place.bucket * SLOTS;
  while (matches != 0) {
    const i64 first = begin + __ffsll(matches) - 1;
    if (exact) return first;
    matches &= matches - 1;
    const i64 second = matches != 0 ? begin + __ffsll(matches) - 1 : first;
    matches &= matches - 1;
    const i64 first_key = load_held_key<QUIET>(index.keys + first);
    const i64 second_key = second != first ? load_held_key<QUIET>(index.keys + second) : first_key;
    if (first_key == key) return first;
    if (second_key == key) return second;
  }
  return -1;
}
