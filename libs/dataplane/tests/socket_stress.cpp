// Stress of the socket server and the client over owners without Python, to be built with a sanitizer: exits 0 if every row that
// a complete ticket promised is right, while owners come and go and callers change their minds.
#include <arpa/inet.h>
#include <sys/un.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

#include "../src/remote_client.hpp"
#include "../src/socket_server.hpp"
#include "../src/workers.hpp"

using namespace treadle::dataplane;

namespace {

constexpr int64_t ROWS = 4000, ROW_BYTES = 48, IDS_MAX_EACH = 300;
constexpr int CALLERS = 3, CALLS_EACH = 150, RESTARTS = 12;
constexpr int64_t SECOND = 1'000'000'000;

void expect(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "broken: %s\n", what);
    std::_Exit(1);
}

std::byte byte_of(int64_t row, int64_t place) { return static_cast<std::byte>((row * 131 + place * 7) & 0xff); }

std::vector<std::byte> make_table() {
    std::vector<std::byte> table(static_cast<size_t>(ROWS * ROW_BYTES));
    for (int64_t row = 0; row < ROWS; ++row)
        for (int64_t i = 0; i < ROW_BYTES; ++i) table[static_cast<size_t>(row * ROW_BYTES + i)] = byte_of(row, i);
    return table;
}

// An owner of rows [first, last), on a Unix socket.
struct Server {
    Server(const std::vector<std::byte>& table, std::string path, int64_t first, int64_t last) : path(std::move(path)), queue(64, 1), workers(queue, 1) {
        auto version = std::make_shared<Version>();
        version->digest.fill(std::byte{7});
        const int32_t orders[] = {1};
        const uint64_t multipliers[] = {1};
        const int64_t primes[] = {ROWS}, offsets[] = {0};
        const treadle::kernels::HashPlanView view{treadle::kernels::Family::demo, 1, 1, orders, 1, multipliers, primes, offsets, 0, -1, nullptr, ROWS};
        std::vector<RowRange> held;
        if (first > 0 || last < ROWS) held.push_back({first, last});
        version->layers.push_back({3, std::make_shared<Plan>(view), std::make_shared<MemoryRows>(table.data(), ROWS, ROW_BYTES, held)});
        versions->publish(version);
        open();
    }
    ~Server() {
        server.reset();
        workers.join();
        ::unlink(path.c_str());
    }
    void open() {
        Descriptor fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        sockaddr_un place{};
        place.sun_family = AF_UNIX;
        std::strncpy(place.sun_path, path.c_str(), sizeof place.sun_path - 1);
        ::unlink(path.c_str());
        expect(::bind(fd.get(), reinterpret_cast<sockaddr*>(&place), sizeof place) == 0 && ::listen(fd.get(), 64) == 0, "the server listens");
        std::vector<Descriptor> listeners;
        listeners.push_back(std::move(fd));
        server = std::make_unique<SocketServer>(queue, 64, versions, SocketLimits{}, std::move(listeners));
    }
    void restart() {
        server.reset();
        open();
    }

    const std::string path;
    Queue queue;
    Workers workers;
    std::shared_ptr<Versions> versions = std::make_shared<Versions>();
    std::unique_ptr<SocketServer> server;
};

struct Buffers {
    std::vector<int64_t> ids;
    std::vector<std::byte> out;
};

CallRef make_call(const RemoteVersion& version, const Buffers& buffers, std::byte* out, int64_t give_up_ns) {
    auto call = std::make_shared<Call>();
    call->spread = version.spread();
    call->header.version = version.digest;
    call->deadline_ns = now_ns() + SECOND;
    call->give_up_ns = now_ns() + give_up_ns;
    call->whole = call->spread->routes[0] == nullptr;
    const auto rows = static_cast<int64_t>(buffers.ids.size());
    call->layers.push_back({std::make_shared<Ticket>(Job{{}, rows, 1}, call->deadline_ns, nullptr), out, rows, ROW_BYTES, 0, {}});
    call->numbers.push_back(3);
    call->row_bytes.push_back(ROW_BYTES);
    return call;
}

void ask(const std::shared_ptr<RemoteClient>& client, unsigned seed, std::atomic<int>& complete) {
    std::mt19937 random(seed);
    for (int i = 0; i < CALLS_EACH; ++i) {
        Buffers buffers;
        for (int64_t n = 1 + static_cast<int64_t>(random() % IDS_MAX_EACH); n > 0; --n) buffers.ids.push_back(static_cast<int64_t>(random() % ROWS));
        buffers.out.resize(buffers.ids.size() * ROW_BYTES);
        const CallRef call = make_call(*client->version(), buffers, buffers.out.data(), 10 * SECOND);
        const Split split(*call, 0, now_ns());
        std::vector<Segment> segments{{0, 0, 0, buffers.ids, {}}};
        auto shares = call->whole ? split.whole({gather_work(std::move(segments), call->numbers, call->row_bytes)}) : split.rows(segments, {0});
        expect(client->start(call, std::move(shares)) == Fault::none, "a call starts");
        Ticket& ticket = *call->layers[0].ticket;
        const bool changes_mind = random() % 4 == 0;
        if (changes_mind) client->cancel(call, 0);
        expect(ticket.wait_until(now_ns() + 30 * SECOND), "a ticket ends");
        if (ticket.state() == State::complete) {
            ++complete;
            for (size_t row = 0; row < buffers.ids.size(); ++row)
                for (int64_t at = 0; at < ROW_BYTES; ++at)
                    expect(buffers.out[row * ROW_BYTES + static_cast<size_t>(at)] == byte_of(buffers.ids[row], at), "the rows are those that were asked for");
        } else {
            expect(changes_mind, "a call fails only where its caller has left: a replica lives");
        }
        std::fill(buffers.out.begin(), buffers.out.end(), std::byte{0});  // ours again; a sanitizer sees who still writes
        for (const TicketRef& ended : client->take_finished()) expect(ended->ended(), "only ended tickets are let go");
    }
}

void round(const std::vector<std::byte>& table, bool spread) {
    const std::string folder = "/tmp/treadle-stress-" + std::to_string(::getpid()) + (spread ? "-s" : "-w");
    std::vector<std::unique_ptr<Server>> servers;
    const int64_t cuts[] = {0, ROWS / 3, 2 * ROWS / 3, ROWS};
    for (int i = 0; i < 3; ++i)  // each third has two owners
        servers.push_back(std::make_unique<Server>(table, folder + std::to_string(i), spread && i == 2 ? cuts[1] : 0, spread && i == 1 ? cuts[2] : ROWS));
    auto hub = std::make_shared<Hub>();
    auto version = std::make_shared<RemoteVersion>();
    version->digest.fill(std::byte{7});
    version->layers.push_back({3, ROWS, ROW_BYTES, nullptr});
    version->change([&](RemoteVersion::Spread& now) {
        now.routes.resize(1);
        for (const auto& server : servers) now.owners.push_back(hub->owner("unix:" + server->path));
        if (spread) now.routes[0] = std::make_shared<Routes>(Routes{{cuts[0], cuts[1], cuts[2], cuts[3]}, {1, 0, 2, 1, 2, 0}, 2});
    });
    auto client = std::make_shared<RemoteClient>(hub, version);
    std::atomic<int> complete{0};
    std::vector<std::thread> callers;
    for (unsigned caller = 0; caller < CALLERS; ++caller) callers.emplace_back([&, caller] { ask(client, caller, complete); });
    std::mt19937 random(99);
    for (int i = 0; i < RESTARTS; ++i) {
        servers[random() % servers.size()]->restart();
        ::usleep(3000);
    }
    for (auto& caller : callers) caller.join();
    expect(complete > CALLERS * CALLS_EACH / 2, "most calls were waited for, and all of those came");
    Wakeup closed;
    client->close([&] { closed.set(); });
    expect(poll_until(closed.fd(), POLLIN, now_ns() + 10 * SECOND), "a client closes");
    hub->reactor->close();
}

}  // namespace

int main() {
    const auto table = make_table();
    round(table, false);
    round(table, true);
    std::puts("ok");
}
