// A team of threads that runs one function at a time and meets at barriers. Owns its workers; knows nothing of what
// runs.
//
// A token's step is some hundred short pieces of work, so handing one over must cost about a microsecond; and a team
// that waits for the rest of the program must not burn a core. Both ends wait the same way: spin for kSpin, then sleep
// on a futex (std::atomic::wait).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace hf {

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Team {
public:
    // `threads` >= 1, the caller of `run` is thread 0: threads - 1 workers are started.
    explicit Team(int threads) : threads_(threads < 1 ? 1 : threads) {
        for (int thread = 1; thread < threads_; ++thread) workers_.emplace_back([this, thread] { work(thread); });
    }
    ~Team() {
        call_ = nullptr;
        started_.fetch_add(1);
        started_.notify_all();
        for (auto& worker : workers_) worker.join();
    }
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return threads_; }

    // Calls function(thread) once on every thread of the team and returns when all are done. Calls from several threads
    // of the program take turns. Not to be called from inside `function`.
    template <class Function> void run(Function&& function) {
        std::lock_guard<std::mutex> one_at_a_time(mutex_);
        if (threads_ == 1) {
            function(0);
            return;
        }
        argument_ = (void*)&function;
        call_ = [](void* argument, int thread) { (*(std::remove_reference_t<Function>*)argument)(thread); };
        started_.fetch_add(1);
        started_.notify_all();
        function(0);
        barrier();
    }

    // Every thread of the team waits here for all others, and calls `meanwhile` again and again while it does. Only
    // inside `run`, by all threads the same number of times.
    void barrier() { barrier(pause); }
    template <class Meanwhile> void barrier(Meanwhile&& meanwhile) {
        if (threads_ == 1) return;
        uint32_t phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1) + 1 == threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.fetch_add(1);
            phase_.notify_all();
        } else {
            await_change(phase_, phase, meanwhile);
        }
    }

private:
    static constexpr std::chrono::microseconds kSpin{40};

    template <class Meanwhile>
    static void await_change(std::atomic<uint32_t>& value, uint32_t old, Meanwhile&& meanwhile) {
        for (int round = 0; round < 64; ++round) {
            if (value.load(std::memory_order_acquire) != old) return;
            meanwhile();
        }
        auto until = std::chrono::steady_clock::now() + kSpin;
        do {
            for (int round = 0; round < 32; ++round) {
                if (value.load(std::memory_order_acquire) != old) return;
                meanwhile();
            }
        } while (std::chrono::steady_clock::now() < until);
        while (value.load(std::memory_order_acquire) == old) value.wait(old);
    }

    void work(int thread) {
        for (uint32_t seen = 0;; ++seen) {
            await_change(started_, seen, pause);
            if (call_ == nullptr) return;
            call_(argument_, thread);
            barrier();
        }
    }

    const int threads_;
    std::mutex mutex_;
    void (*call_)(void*, int) = nullptr;
    void* argument_ = nullptr;
    alignas(64) std::atomic<uint32_t> started_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    alignas(64) std::atomic<int> arrived_{0};
    std::vector<std::thread> workers_;
};

// The `thread`-th of `threads` nearly equal consecutive shares of `count` things: [first, last).
struct Share {
    long first, last;
};
inline Share share_of(long count, int thread, int threads) {
    return {count * thread / threads, count * (thread + 1) / threads};
}

}  // namespace hf
