// The bags of a tile, each pooled to one vector.

__device__ __forceinline__ float larger(float a, float b) { return b > a || b != b ? b : a; }  // a NaN wins

constexpr int POOLED_IN_FLIGHT = 8;  // rows that a group of lanes loads before it adds the first
constexpr u32 SUM_BLOCK = 32;        // keys of a bag whose vectors are added up in float32, as in kernels/cpu/vectors.py

// A key by its place among those of a pooled segment.
__device__ __forceinline__ i64 load_key_at(const Segment& segment, i64 place) {
  const u8* address = segment.keys;
  if (segment.begins != nullptr || segment.row_stride == segment.keys_per_row * segment.key_stride) {
    address += place * segment.key_stride;
  } else {
    const u32 row = (u32)place / (u32)segment.keys_per_row;
    address += row * segment.row_stride + ((u32)place - row * (u32)segment.keys_per_row) * segment.key_stride;
  }
  return load_key(address, segment.key_bytes);
}

// What a warp has found of some keys, and sums of whole blocks of a bag: in shared memory, so that finding rows and adding
// them up need not share registers.
struct Found {
  const u8* rows[LANES];
  float weights[LANES];
  u8 codes[LANES];
  u32 ends[MAX_BAGS_PER_TILE];    // of bags: see Bags
  i64 begins[MAX_BAGS_PER_TILE];
  Segment segment;
  double blocks[Elements<true>::COUNT][LANES];  // of each lane's elements
};

__device__ __forceinline__ Found& found_of_warp() {
  __shared__ Found all_found[4];  // of the warps of a block
  return all_found[threadIdx.x / LANES];
}

// The bags of a tile: their keys are one list, bag after bag, so that every lane finds a key's row even where bags are short.
struct Bags {
  Found& found;
  u32 total;
  bool are_one_run;  // of the segment's keys

  __device__ __forceinline__ Bags(Found& found, const Segment& segment, u32 first, u32 count) : found(found) {
    const u32 lane = threadIdx.x % LANES;
    u32 length = 0;
    i64 begin = 0;
    if (lane < count) {
      begin = segment.begins != nullptr ? segment.begins[first + lane] : (i64)(first + lane) * segment.keys_per_row;
      length = (u32)(segment.begins != nullptr ? segment.ends[first + lane] - begin : segment.keys_per_row);
    }
    u32 end = length;
    for (int distance = 1; distance < MAX_BAGS_PER_TILE; distance *= 2) {
      const u32 before = __shfl_up_sync(ALL_LANES, end, distance);
      if (lane >= distance) end += before;
    }
    begin -= end - length;
    total = __shfl_sync(ALL_LANES, end, MAX_BAGS_PER_TILE - 1);
    const i64 begin_of_first = __shfl_sync(ALL_LANES, begin, 0);
    are_one_run = __all_sync(ALL_LANES, lane >= count || begin == begin_of_first);
    if (lane < MAX_BAGS_PER_TILE) {
      found.ends[lane] = end;
      found.begins[lane] = begin;
    }
    __syncwarp();
  }

  // Where a bag ends in the list.
  __device__ __forceinline__ u32 end_of(u32 bag) const { return found.ends[bag % MAX_BAGS_PER_TILE]; }

  // Place of a key of the list among those of the segment.
  __device__ __forceinline__ i64 place_of(u32 key, u32 count) const {
    u32 bag = 0;
    for (u32 i = 0; !are_one_run && i + 1 < count; ++i) bag += key >= end_of(i);
    return found.begins[bag] + key;
  }
};

// A bag's vector while it is being added up. The lanes that share a row are a group; groups take rows in turn. Sums in float32
// would lose digits if bags were long, so those of blocks are added up in double precision.
template <bool WIDE>
struct Sum {
  Elements<WIDE> elements;
  int step, steps, width;

  __device__ __forceinline__ void begin(bool takes_largest) {
    elements = Elements<WIDE>::all(takes_largest ? -__int_as_float(0x7f800000) : 0.0f);
  }

  __device__ __forceinline__ void add(const Elements<WIDE>& row, float weight, bool takes_largest) {
    if (takes_largest) elements = elements.with(row, [=](float a, float b) { return larger(a, b * weight); });
    else elements = elements.with(row, [=](float a, float b) { return __fadd_rn(a, __fmul_rn(b, weight)); });
  }

  // Which of the next rows this lane's group takes first. Which group takes a row depends on its place in the bag alone, so that
  // a bag has the same sum wherever it lies in a request.
  __device__ __forceinline__ u32 group_after(u32 before) const {
    return (threadIdx.x % LANES / width - before) & (LANES / width - 1);
  }

  __device__ __forceinline__ void end_block(Found& found, bool is_first) {
    float* values = reinterpret_cast<float*>(&elements);
#pragma unroll
    for (int i = 0; i < Elements<WIDE>::COUNT; ++i) {
      double& sum = found.blocks[i][threadIdx.x % LANES];
      sum = is_first ? values[i] : sum + values[i];
      values[i] = 0.0f;
    }
  }

  __device__ __forceinline__ void add_blocks(const Found& found) {
    float* values = reinterpret_cast<float*>(&elements);
#pragma unroll
    for (int i = 0; i < Elements<WIDE>::COUNT; ++i) values[i] = (float)(found.blocks[i][threadIdx.x % LANES] + values[i]);
  }

  __device__ __forceinline__ void end(const Segment& segment, const Found& found, u8* output, u32 length, bool takes_largest) {
    if (length > SUM_BLOCK && !takes_largest) add_blocks(found);
    for (int distance = width; distance < LANES; distance *= 2) {
      const Elements<WIDE> other = elements.from_lane(distance);
      if (takes_largest) elements = elements.with(other, [](float a, float b) { return larger(a, b); });
      else elements = elements.with(other, [](float a, float b) { return a + b; });
    }
    if (length == 0) elements = Elements<WIDE>::all(0.0f);
    if (segment.pooling == MEAN && length > 0) {
      const float divisor = (float)length;
      elements = elements.with(elements, [=](float a, float) { return __fdiv_rn(a, divisor); });
    }
    if (threadIdx.x % LANES < width && step < steps) elements.store(output, step, Output::is_narrowed(segment));
  }
};

// Add rows of `found` from one on, as many as make whole rounds before `to`: all of them are there and in float32, and the
// whole warp takes each. Returns how many were added.
__device__ __forceinline__ u32 add_rounds(const Found& found, Sum<true>& sum, u32 from, u32 to) {
  const int step = min(sum.step, sum.steps - 1);
  const u32 count = (to - from) / POOLED_IN_FLIGHT * POOLED_IN_FLIGHT;
  const u8* const* rows = found.rows + from;
#pragma unroll 1
  for (const u8* const* end = rows + count; rows < end; rows += POOLED_IN_FLIGHT) {
    Elements<true> elements[POOLED_IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < POOLED_IN_FLIGHT; ++i) elements[i] = Elements<true>::load<FLOAT32>(rows[i], step, 0);
#pragma unroll
    for (int i = 0; i < POOLED_IN_FLIGHT; ++i) sum.elements = sum.elements.with(elements[i], [](float a, float b) { return a + b; });
  }
  return count;
}

// Add rows [from, to) of `found` as they are, all of them stored as CODE. `before`: keys that the bag has before `from`.
template <int CODE, bool WIDE>
__device__ __forceinline__ void add_rows(const Found& found, Sum<WIDE>& sum, u32 from, u32 to, u32 before, int dim) {
  const u32 rows_at_once = LANES / sum.width, group = sum.group_after(before);
  const int step = min(sum.step, sum.steps - 1);
  constexpr int AT_ONCE = CODE == INT8 ? POOLED_IN_FLIGHT / 2 : POOLED_IN_FLIGHT;
#pragma unroll 1
  for (u32 place = from + group; place < to + group; place += rows_at_once * AT_ONCE) {
    Elements<WIDE> elements[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const u8* row = place + i * rows_at_once < to ? found.rows[place + i * rows_at_once] : nullptr;
      elements[i] = row != nullptr ? Elements<WIDE>::template load<CODE>(row, step, dim) : Elements<WIDE>::all(0.0f);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) sum.elements = sum.elements.with(elements[i], [](float a, float b) { return a + b; });
  }
}

// Add rows [from, to) of `found`, each by the whole warp; `factors` are those of this lane's row, and `begin_row` is called before
// each. Rows of bags to come are asked for before a bag ends: of short bags few would be under way otherwise.
template <int CODE, typename BeginRow>
__device__ __forceinline__ void add_rows_of_bags(const Found& found, Sum<true>& sum, u32 from, u32 to, Factors factors,
                                                 BeginRow begin_row) {
  const int step = min(sum.step, sum.steps - 1);
#pragma unroll 1
  for (; from < to; from += POOLED_IN_FLIGHT) {
    Stored<CODE> stored[POOLED_IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < POOLED_IN_FLIGHT; ++i) {
      const u8* row = from + i < to ? found.rows[from + i] : nullptr;
      stored[i] = row != nullptr ? Elements<true>::load_stored<CODE>(row, step) : Stored<CODE>{};
    }
#pragma unroll
    for (int i = 0; i < POOLED_IN_FLIGHT; ++i) {
      if (from + i >= to) break;
      begin_row(from + i);
      const Elements<true> row = Elements<true>::widened(stored[i], CODE == INT8 ? factors.of_lane(from + i) : Factors{});
      sum.elements = sum.elements.with(row, [](float a, float b) { return a + b; });
    }
  }
}

// Rows of several types, with weights, or of which the largest elements count.
template <bool WIDE>
__device__ __forceinline__ void add_any_rows(const Found& found, Sum<WIDE>& sum, u32 from, u32 to, u32 before, int dim,
                                             bool takes_largest) {
  const u32 rows_at_once = LANES / sum.width;
  const int step = min(sum.step, sum.steps - 1);
#pragma unroll 1
  for (u32 place = from + sum.group_after(before); place < to; place += rows_at_once) {
    const u8* row = found.rows[place];
    Elements<WIDE> elements = Elements<WIDE>::all(0.0f);
    if (row == nullptr) {
      // the key has no row and its table no default vector: zeros
    } else if (found.codes[place] == FLOAT32) {
      elements = Elements<WIDE>::template load<FLOAT32>(row, step, dim);
    } else if (found.codes[place] == FLOAT16) {
      elements = Elements<WIDE>::template load<FLOAT16>(row, step, dim);
    } else {
      elements = Elements<WIDE>::template load<INT8>(row, step, dim);
    }
    sum.add(elements, found.weights[place], takes_largest);
  }
}

// The same of rows that are all stored as CODE, as many as make whole rounds. Returns how many were added.
template <int CODE, bool WIDE>
__device__ __forceinline__ u32 add_any_rounds(const Found& found, Sum<WIDE>& sum, u32 from, u32 to, u32 before, int dim,
                                              bool takes_largest) {
  constexpr u32 AT_ONCE = POOLED_IN_FLIGHT / 2;
  const u32 rows_at_once = LANES / sum.width, round = rows_at_once * AT_ONCE, count = (to - from) / round * round;
  const int step = min(sum.step, sum.steps - 1);
#pragma unroll 1
  for (u32 place = from + sum.group_after(before); place < from + count; place += round) {
    Elements<WIDE> elements[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const u8* row = found.rows[place + i * rows_at_once];
      elements[i] = row != nullptr ? Elements<WIDE>::template load<CODE>(row, step, dim) : Elements<WIDE>::all(0.0f);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) sum.add(elements[i], found.weights[place + i * rows_at_once], takes_largest);
  }
  return count;
}

// CODE: how most rows are stored. PLAIN: sums or means without weights. ONE_STEP: the whole warp takes a row, each
// lane at most once.
template <int CODE, bool WIDE, bool PLAIN, bool ONE_STEP>
__device__ __forceinline__ void pool_bags(const Request& request, const Segment& given, const Table& table, u32 s, u32 first,
                                          u32 count, bool marking) {
  Found& found = found_of_warp();
  const u32 lane = threadIdx.x % LANES;
  const Segment& segment = found.segment;  // a copy: what is in the parameters or elsewhere takes longer to read
  if (lane == 0) found.segment = given;
  __syncwarp();
  const bool takes_largest = !PLAIN && segment.pooling == MAX, weighted = !PLAIN && segment.weights != nullptr;
  const Bags bags(found, segment, first, count);
  UnknownCount unknown_count;
  Sum<WIDE> sum;
  sum.steps = (int)table.dim / Elements<WIDE>::COUNT;
  sum.width = ONE_STEP ? LANES : lanes_per_row(sum.steps);
  for (int first_step = 0; ONE_STEP ? first_step == 0 : first_step < sum.steps; first_step += sum.width) {
    sum.step = first_step + (lane & (sum.width - 1));
    sum.begin(takes_largest);
    u8* output = segment.output + first * segment.output_stride;
    u32 bag = 0, bag_begin = 0, bag_end = bags.end_of(0), block_end = min(bag_end, SUM_BLOCK), found_end = 0;
    const auto end_block = [&] {
      const u32 place = block_end;
      if (place != bag_end) {
        if (!takes_largest) sum.end_block(found, place - bag_begin == SUM_BLOCK);
      } else {
        sum.end(segment, found, output, place - bag_begin, takes_largest);
        sum.begin(takes_largest);
        output += segment.output_stride;
        bag_begin = place;
        bag_end = ++bag < count ? bags.end_of(bag) : ~0u;
      }
      block_end = min(bag_end, place + SUM_BLOCK);
    };
    bool same = false, whole = false;
    Factors factors;
    for (u32 place = 0; bag < count;) {  // in the list
      if (place == block_end) {
        end_block();
        continue;
      }
      if (place == found_end) {
        const bool asked = place + lane < bags.total;
        const i64 position = bags.place_of(place + lane, count);
        Source source;
        if (asked) source = find_source(table, load_key_at(segment, position), marking);
        if (first_step == 0) note_missing(request, table, s, asked, source, unknown_count);
        __syncwarp();
        found.rows[lane] = source.row;
        if constexpr (NARROW_ROWS || !PLAIN) {
          found.codes[lane] = (u8)source.code;
          found.weights[lane] = weighted && asked ? segment.weights[position] : 1.0f;
        }
        same = !NARROW_ROWS || !__any_sync(ALL_LANES, source.row != nullptr && source.code != CODE);
        whole = same && sum.width == LANES && !__any_sync(ALL_LANES, asked && source.row == nullptr);
        if (CODE != FLOAT32 && same) factors = Factors::load<CODE>(source.row, (int)table.dim);
        __syncwarp();
        found_end = min(place + LANES, bags.total);
      }
      if constexpr (PLAIN && WIDE && CODE != FLOAT32) {  // whose rows would not all fit into registers
        if (same && sum.width == LANES) {
          const u32 base = place - place % LANES;
          add_rows_of_bags<CODE>(found, sum, place - base, found_end - base, factors, [&](u32 row) {
            while (block_end == base + row) end_block();
          });
          place = found_end;
          continue;
        }
      }
      const u32 end = min(block_end, found_end), from = place % LANES, to = from + end - place;
      u32 num_added = 0;
      if constexpr (PLAIN && WIDE && CODE == FLOAT32) {
        if (whole) num_added = add_rounds(found, sum, from, to);
      } else if constexpr (!PLAIN) {
        if (same) num_added = add_any_rounds<CODE, WIDE>(found, sum, from, to, place - bag_begin, (int)table.dim, takes_largest);
      }
      const u32 rest = from + num_added, before = place + num_added - bag_begin;
      if (PLAIN && same) add_rows<CODE, WIDE>(found, sum, rest, to, before, (int)table.dim);
      else add_any_rows<WIDE>(found, sum, rest, to, before, (int)table.dim, takes_largest);
      place = end;
    }
  }
  unknown_count.report(request, s);
}

template <bool WIDE, bool PLAIN>
__device__ __forceinline__ void pool_by_code(const Request& request, const Segment& segment, const Table& table, u32 s, u32 first,
                                             u32 count, bool marking) {
  const int code = code_of(ROWS_CHANGE ? table.base_rows : table.cached_rows);  // of most rows
  if (code == FLOAT16) pool_bags<FLOAT16, WIDE, PLAIN, false>(request, segment, table, s, first, count, marking);
  else if (code == INT8) pool_bags<INT8, WIDE, PLAIN, false>(request, segment, table, s, first, count, marking);
  else pool_bags<FLOAT32, WIDE, PLAIN, false>(request, segment, table, s, first, count, marking);
}

// All bags but the usual ones.
template <bool WIDE>
__device__ __forceinline__ void pool_any(const Request& request, const Segment& segment, const Table& table, u32 s, u32 first,
                                         u32 count, bool marking) {
  const bool plain = segment.pooling != MAX && segment.weights == nullptr;
  if (!plain) pool_by_code<WIDE, false>(request, segment, table, s, first, count, marking);
  else if (NARROW_ROWS || !WIDE) pool_by_code<WIDE, true>(request, segment, table, s, first, count, marking);
}

// Whether a tile has usual bags: sums or means without weights, of rows in float32.
__device__ __forceinline__ bool are_usual(const Segment& segment, const Table& table) {
  const bool sums = segment.pooling == SUM || segment.pooling == MEAN;
  return !NARROW_ROWS && sums && segment.weights == nullptr && is_wide(table, segment);
}
