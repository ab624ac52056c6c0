// A round between a kernel and the host's proxy, without a network: push a descriptor, wait for the word that answers.
// Not part of the product.
//
// Memory order: as in kernels/common/push.cuh; places in the ring and the fence in front of a push are measured apart.

struct Ping {
  World world;
  u64* word;    // pinned: rounds that the host has answered
  u64* fences_ns;  // [rounds] of taking a place, and of the fence in front of the push
  u64* begun_ns;   // [rounds] the GPU's clock before the push
  u64* seen_ns;    // [rounds] and when the word is seen
  u64* reads_ns;   // [rounds] of one load of the word
  u8* payload;  // pinned: what a fence has to wait for
  u64 rounds;
};

constexpr u64 kPoll = 1216;  // of about this many nanoseconds

extern "C" __global__ void __launch_bounds__(THREADS) ping(const __grid_constant__ Ping args) {
  if (threadIdx.x != 0) return;
  for (u64 i = 0; i < args.rounds; ++i) {
    ptx::store_pair(args.payload + i % 64 * 16, i, i);
    const u64 first = ptx::now_ns();
    net::Places place = net::take_places(args.world, 1);
    ptx::fence_sys();
    const u64 begin = ptx::now_ns();
    net::push(args.world, place, 1, 0, 0, net::immediate(FLAG_PAYLOAD, 1, i), OP_DISPATCH);
    while (ptx::now_ns() - begin < i * 977 % kPoll) {  // else every answer falls at one place of a poll
    }
    while (ptx::load_acquire_sys(args.word) <= i && ptx::now_ns() - begin < args.world.timeout_ns) {
    }
    const u64 seen = ptx::now_ns();
    const u64 again = ptx::load_acquire_sys(args.word);
    args.fences_ns[i] = begin - first;
    args.begun_ns[i] = begin;
    args.seen_ns[i] = seen;
    args.reads_ns[i] = (again != 0 ? ptx::now_ns() : 0) - seen;
  }
}
