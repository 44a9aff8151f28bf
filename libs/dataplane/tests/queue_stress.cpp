// Stress of queue, tickets and workers without Python, to be built with a sanitizer: exits 0 if every unit ran as promised.
#include <cstdio>
#include <cstdlib>
#include <random>

#include "../src/workers.hpp"

using namespace treadle::dataplane;

namespace {

constexpr int SUBMITTERS = 3, TICKETS_EACH = 400, WORKERS = 3;
constexpr int64_t UNITS_MAX = 60, PIECE_UNITS = 7;

void expect(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "broken: %s\n", what);
    std::exit(1);
}

TicketRef marking_ticket(std::mt19937& random) {
    const int64_t units = static_cast<int64_t>(random() % UNITS_MAX);
    auto marks = std::make_shared<std::vector<int>>(units);
    Job job{[marks](int64_t first, int64_t last) {
                for (int64_t i = first; i < last; ++i) (*marks)[static_cast<size_t>(i)] += 1;
                return Fault::none;
            },
            units, PIECE_UNITS, 1, 64};
    const int64_t deadline_ns = random() % 8 == 0 ? NO_DEADLINE : now_ns() + static_cast<int64_t>(random() % 2'000'000);
    return std::make_shared<Ticket>(std::move(job), deadline_ns, marks, static_cast<int32_t>(random() % 3));
}

// Every unit once if complete; a prefix of whole pieces once, and nothing else, if cancelled.
void check(const Ticket& ticket) {
    const auto& marks = *static_cast<const std::vector<int>*>(ticket.arrays.get());
    for (int64_t i = 0; i < ticket.job.units; ++i) expect(marks[static_cast<size_t>(i)] == (i < ticket.next_unit), "units run once, in order");
    expect(ticket.state() != State::complete || ticket.next_unit == ticket.job.units, "a complete ticket has run wholly");
    expect(ticket.finished_ns >= ticket.submitted_ns && ticket.submitted_ns > 0, "times rise");
}

void submit_and_check(Queue& queue, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<TicketRef> open;
    for (int i = 0; i < TICKETS_EACH; ++i) {
        const TicketRef ticket = marking_ticket(random);
        if (!queue.submit(ticket)) continue;
        if (random() % 50 == 0) queue.reserve("kv", 1'000'000'000, static_cast<int64_t>(random() % 3) * 100'000'000, now_ns() + 1'000'000);
        if (random() % 4 == 0) expect(ticket->event_fd() >= 0, "eventfd");
        if (random() % 5 == 0) queue.stop(ticket);
        if (random() % 3 == 0) expect(ticket->wait_until(now_ns() + 30'000'000'000), "a ticket ends");
        for (const TicketRef& finished : queue.take_finished()) expect(finished != nullptr, "a finished ticket is still there");
        open.push_back(ticket);
    }
    for (const TicketRef& ticket : open) {
        expect(ticket->wait_until(now_ns() + 30'000'000'000), "a ticket ends, closed queue or not");
        check(*ticket);
    }
}

void round(unsigned seed, bool close_early) {
    const QueueOptions options{.admission = seed % 2 == 1, .hints_max = 4, .piece_ns = 1'000};
    const auto tenants = std::make_shared<Tenants>(std::vector<TenantLimits>{{"a"}, {"b", 2.0, 1, 0, 0}, {"c", 1.0, 0, 1'000'000, 0}});
    Queue queue(64, WORKERS, options, tenants);
    Workers workers(queue, WORKERS);
    std::vector<std::thread> submitters;
    for (unsigned i = 0; i < SUBMITTERS; ++i) submitters.emplace_back([&queue, seed, i] { submit_and_check(queue, seed * 100 + i); });
    if (close_early) workers.join();
    for (auto& thread : submitters) thread.join();
    uint64_t admitted = 0;
    for (size_t i = 0; i < tenants->size(); ++i) admitted += tenants->counters(i).admitted;
    expect(admitted <= queue.counters().tickets_total, "each ticket is admitted once");
}

}  // namespace

int main() {
    for (unsigned seed = 0; seed < 20; ++seed) round(seed, seed % 4 == 3);
    std::puts("ok");
}
