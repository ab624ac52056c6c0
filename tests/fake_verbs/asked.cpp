// What tests ask of the library.
#include "fake.hpp"

using namespace fake;

namespace {
using Lock = std::lock_guard<std::mutex>;
}

IBV Faults* fake_faults(int number) { return &state().faults[number]; }
IBV void fake_counts(Counts* out) {
  Lock lock(state().mutex);
  *out = state().counts;
}
IBV void fake_sizes(uint64_t* out) {
  out[0] = sizeof(Faults);
  out[1] = sizeof(Counts);
}
// Memory of a device, from now on.
IBV void fake_device(uint64_t address, uint64_t bytes, const Driver* driver) {
  Lock lock(state().mutex);
  state().device_memory.push_back({address, bytes, *driver});
}
// It is no device's any more.
IBV void fake_no_device(uint64_t address) {
  Lock lock(state().mutex);
  std::vector<DeviceMemory>& all = state().device_memory;
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].address == address) all.erase(all.begin() + long(i--));
  }
}
// After a change of Faults: what waits looks at them.
IBV void fake_look() { kick(); }

// An asynchronous event of a device, to each that has opened it, or for each of its queue pairs or queues.
IBV void fake_event(int number, int type) {
  Lock lock(state().mutex);
  for (OpenDevice* context : state().contexts) {
    if (context->number != number) continue;
    AsyncEvent event{};
    event.type = type;
    event.port = 1;
    const bool is_pair = is_of_pair(type);
    if (!is_pair && type != kQueueError) tell(*context, event);
    if (type == kDeviceFatal) context->is_dead = true;
    Queue* told = nullptr;
    for (QueuePair* pair : state().pairs) {
      if (pair->context != context) continue;
      if (is_pair) {
        event.pair = pair;
        tell(*context, event);
      }
      if (type == kQueueError && pair->send_queue != told) {
        event.queue = told = pair->send_queue;
        static_cast<CompletionQueue*>(told)->is_dead = true;
        tell(*context, event);
      }
      if (is_pair || type == kDeviceFatal) fail(*pair, kFlushed);
    }
  }
}
