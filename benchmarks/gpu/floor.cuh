// The fixed cost of two kernels that depend on all peers, with as little as possible in between. Not part of the
// product.
//
//   empty     a launch and nothing else
//   exchange  each block stores one line of 16 bytes to the same block of each peer and polls for theirs: data and
//             sequence number in one relaxed store, so the line itself says that it is there
//   release   the same data, announced by a flag: store, st.release of the flag, ld.acquire until it is there, load
//
//   block b of rank 0                          block b of rank 1
//   store (word(0, b, n), n) ----------------> lines[b][0]: polled until its sequence number is n
//   lines[b][1] <----------------------------- store (word(1, b, n), n)
//
// Memory order. A 16-byte aligned vector store is seen as a whole, so a reader of sequence number n reads the word of
// n. `release` needs no such promise: the flag's release orders the word before it, the reader's acquire orders its
// load after. A node of the graph has lines and counters of its own; n grows with each replay, and a reader takes any
// number >= n, which a peer can reach only after this block's store of the same n. Counters are written by the node
// itself and read before the wait for the kernel in front: replays of a graph do not overlap.
//
// Every wait ends: at the deadline, or once another has ended so; then `failed` says how many, and nothing was
// measured.

constexpr u32 kLine = 128, kFlag = 64;  // bytes from line to line, and from a line to its flag
constexpr u32 kLookAround = 64;         // polls between two looks at the clock

struct Exchange {
  u64 peers[MAX_RANKS];  // [R] address of each rank's memory
  u64 offset;            // of this node's lines in it: [blocks, R] lines
  u64* counts;           // [blocks] exchanges that this node has done
  u64* arrived;          // [blocks, R] words that peers sent
  u64* failed;           // [1] waits that ended without
  u64 timeout_ns;
  i32 rank, size;
};

// What rank `rank` sends in exchange n.
__device__ __forceinline__ u64 word_of(i32 rank, u32 block, u64 n) {
  return static_cast<u64>(rank + 1) << 48 | static_cast<u64>(block) << 32 | n;
}

__device__ __forceinline__ u8* line_at(const Exchange& args, i32 at, i32 from) {
  u8* lines = reinterpret_cast<u8*>(args.peers[at] + args.offset);
  return lines + (static_cast<u64>(blockIdx.x) * args.size + from) * kLine;
}

template <class Poll>
__device__ __forceinline__ bool wait_until(const Exchange& args, Poll poll) {
  if (poll()) return true;
  const u64 start = ptx::now_ns();
#pragma unroll 1
  for (u32 polls = 1; !poll(); ++polls) {
    if (polls % kLookAround != 0) continue;
    if (ptx::load_volatile(args.failed) == 0 && ptx::now_ns() - start < args.timeout_ns) continue;
    ptx::add_acq_rel_gpu(args.failed, 1);
    return false;
  }
  return true;
}

struct Pair {
  u64 low, high;
};

// One relaxed store there, one polled load here.
struct Line {
  static __device__ __forceinline__ void send(u8* line, u64 word, u64 n) { ptx::store_pair(line, word, n); }
  static __device__ __forceinline__ bool poll(const u8* line, u64 n, u64* word) {
    const Pair seen = ptx::load_pair<Pair>(line);
    *word = seen.low;
    return seen.high >= n;
  }
};

// A word, and a flag that vouches for it.
struct Flag {
  static __device__ __forceinline__ void send(u8* line, u64 word, u64 n) {
    ptx::store_relaxed_sys(reinterpret_cast<u64*>(line), word);
    ptx::store_release_sys(reinterpret_cast<u64*>(line + kFlag), n);
  }
  static __device__ __forceinline__ bool poll(const u8* line, u64 n, u64* word) {
    if (ptx::load_acquire_sys(reinterpret_cast<const u64*>(line + kFlag)) < n) return false;
    *word = ptx::load_relaxed_sys(reinterpret_cast<const u64*>(line));
    return true;
  }
};

template <class Way>
__device__ __forceinline__ void exchange_with_all(const Exchange& args) {
  const u32 block = blockIdx.x;
  const i32 peer = threadIdx.x;
  const u64 n = ptx::load_volatile(&args.counts[block]) + 1;
  __syncthreads();
  ptx::wait_for_previous_launch();
  ptx::allow_next_launch();
  if (peer >= args.size) return;
  u64 word = word_of(peer, block, n);
  if (peer != args.rank) {
    Way::send(line_at(args, peer, args.rank), word_of(args.rank, block, n), n);
    const u8* line = line_at(args, args.rank, peer);
    if (!wait_until(args, [&] { return Way::poll(line, n, &word); })) word = 0;
  } else {
    args.counts[block] = n;
  }
  args.arrived[block * args.size + peer] = word;
}

extern "C" __global__ void empty(const __grid_constant__ Exchange args) {
  ptx::wait_for_previous_launch();
  ptx::allow_next_launch();
}

extern "C" __global__ void exchange(const __grid_constant__ Exchange args) { exchange_with_all<Line>(args); }

extern "C" __global__ void release(const __grid_constant__ Exchange args) { exchange_with_all<Flag>(args); }
