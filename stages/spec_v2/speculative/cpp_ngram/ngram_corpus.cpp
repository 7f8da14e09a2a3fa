// What was said before, as tries of n-grams, and what may come next, as trees of drafts.
//
// ngram_corpus.py says what is what; ngram_twin.py is the same in Python, down to the order of everything.
// A place in `nodes_` is used again once its node is evicted, so whoever keeps a node keeps its `life` too.

#include <algorithm>
#include <cstdint>
#include <new>
#include <queue>
#include <unordered_map>
#include <vector>

namespace {

constexpr int32_t kNone = -1;

struct Node {
  int32_t token, parent, depth;
  int32_t first_child, next_sibling, previous_sibling;  // the best child first
  int32_t next_in_bucket;
  int32_t newer, older;  // among the leaves
  int32_t count;         // how often it was said
  uint32_t life;
};

struct Ref {
  int32_t node = kNone;
  uint32_t life = 0;
};

struct Request {
  int32_t root = kNone;
  int64_t last_token = 0;
  std::vector<Ref> ends[2];  // [own or shared][length]: the node of its last `length` tokens
};

struct Candidate {
  double p;
  int64_t order;
  int32_t node, row;  // row: of its parent in the tree
  bool operator<(const Candidate& other) const {  // the greatest comes first
    return p != other.p ? p < other.p : order > other.order;
  }
};

class Corpus {
 public:
  Corpus(int64_t capacity, int32_t max_depth, int32_t min_breadth, int32_t max_breadth, bool by_frequency)
      : capacity_(capacity),
        max_depth_(max_depth),
        min_breadth_(min_breadth),
        max_breadth_(max_breadth),
        by_frequency_(by_frequency),
        buckets_(1024, kNone) {
    shared_root_ = allocate();
  }

  int64_t size() const { return static_cast<int64_t>(nodes_.size() - free_.size()); }

  void append(int64_t id, const int64_t* tokens, int64_t count) {
    Request& request = find_or_begin(id);
    for (int64_t i = 0; i < count; ++i) {
      for (std::vector<Ref>& ends : request.ends) {
        for (int32_t length = max_depth_ - 1; length >= 0; --length) {
          const int32_t at = alive(ends[length]);
          const int32_t next = at == kNone ? kNone : pass(at, static_cast<int32_t>(tokens[i]));
          if (length + 1 < max_depth_) ends[length + 1] = ref(next);
        }
      }
      request.last_token = tokens[i];
    }
  }

  void forget(int64_t id) {
    const auto found = requests_.find(id);
    if (found == requests_.end()) return;
    const int32_t root = found->second.root;
    for (int32_t node = root; node != kNone;) {
      if (nodes_[node].first_child != kNone) {
        node = nodes_[node].first_child;
        continue;
      }
      const int32_t parent = nodes_[node].parent;
      release(node);
      node = parent;
    }
    requests_.erase(found);
  }

  // Fills rows 0 … n − 1 of each field; their meaning, and that of `said`, is in ngram_corpus.py.
  void match(int64_t id, const int64_t* said, int64_t count, int32_t n, int64_t* token, int64_t* mask,
             int64_t* depth, int64_t* first_child, int64_t* next_sibling) {
    const Request& request = find_or_begin(id);
    std::vector<int32_t> parent(n, kNone), last_child(n, kNone);
    for (int32_t row = 0; row < n; ++row) {
      token[row] = depth[row] = 0;
      mask[row] = static_cast<int64_t>(uint64_t{1} << row);
      first_child[row] = next_sibling[row] = kNone;
    }
    token[0] = count == 0 ? request.last_token : said[count - 1];
    int32_t size = 1;
    for (int32_t length = max_depth_ - 1; length > 0 && size < n; --length) {
      for (const std::vector<Ref>& ends : request.ends) {
        std::priority_queue<Candidate> queue;
        int64_t order = 0;
        const auto propose = [&](int32_t node, double p, int32_t row) {
          int32_t child = nodes_[node].first_child;
          for (int32_t i = breadth(nodes_[node].depth); i > 0 && child != kNone; --i) {
            const double share = static_cast<double>(nodes_[child].count) / nodes_[node].count;
            queue.push({by_frequency_ ? p * share : 0.0, order++, child, row});
            child = nodes_[child].next_sibling;
          }
        };
        if (const int32_t end = end_of(ends, length, said, count); end != kNone) propose(end, 1.0, 0);
        while (!queue.empty() && size < n) {
          const Candidate best = queue.top();
          queue.pop();
          int32_t row = static_cast<int32_t>(first_child[best.row]);
          while (row != kNone && token[row] != nodes_[best.node].token) {
            row = static_cast<int32_t>(next_sibling[row]);
          }
          if (row == kNone) {
            row = size++;
            token[row] = nodes_[best.node].token;
            mask[row] |= mask[best.row];
            depth[row] = depth[best.row] + 1;
            int32_t& last = last_child[best.row];
            (last == kNone ? first_child[best.row] : next_sibling[last]) = row;
            last = row;
          }
          propose(best.node, best.p, row);
        }
      }
    }
  }

 private:
  Request& find_or_begin(int64_t id) {
    const auto [found, is_new] = requests_.try_emplace(id);
    Request& request = found->second;
    if (is_new) {
      request.root = allocate();
      for (std::vector<Ref>& ends : request.ends) ends.resize(max_depth_);
      request.ends[0][0] = ref(request.root);
      request.ends[1][0] = ref(shared_root_);
    }
    return request;
  }

  Ref ref(int32_t node) const { return node == kNone ? Ref{} : Ref{node, nodes_[node].life}; }

  int32_t alive(Ref ref) const {
    return ref.node != kNone && nodes_[ref.node].life == ref.life ? ref.node : kNone;
  }

  // The node of the last `length` tokens, `said` included: from where `ends` leaves off, or from the root.
  int32_t end_of(const std::vector<Ref>& ends, int64_t length, const int64_t* said, int64_t count) {
    int32_t node = alive(ends[std::max<int64_t>(length - count, 0)]);
    for (int64_t i = std::max<int64_t>(count - length, 0); i < count && node != kNone; ++i) {
      node = find(node, static_cast<int32_t>(said[i]));
    }
    return node;
  }

  // Children that a match of `depth` tokens proposes.
  int32_t breadth(int32_t depth) const {
    if (max_depth_ == 2) return max_breadth_;
    const int64_t range = max_breadth_ - min_breadth_;
    return static_cast<int32_t>(max_breadth_ - range * (depth - 1) / (max_depth_ - 2));
  }

  // `token` was said behind `parent`: its node, or kNone where there is no room for it.
  int32_t pass(int32_t parent, int32_t token) {
    int32_t child = find(parent, token);
    if (child == kNone) {
      const bool was_leaf = is_leaf(parent);
      if (was_leaf) leave(parent);  // now, or it would be evicted for its own child
      child = allocate();
      if (!was_leaf && is_leaf(parent)) leave(parent);  // its only child has made room for the new one
      if (child == kNone) {
        if (was_leaf) enter_newest(parent);
        return kNone;
      }
      nodes_[child].token = token;
      nodes_[child].parent = parent;
      nodes_[child].depth = nodes_[parent].depth + 1;
      enter_bucket(child);
    } else {
      if (is_leaf(child)) leave(child);
      unlink(child);
    }
    ++nodes_[child].count;
    link(child);
    if (is_leaf(child)) enter_newest(child);
    return child;
  }

  // ---- places ----

  int32_t allocate() {
    int32_t node;
    if (free_.empty() && static_cast<int64_t>(nodes_.size()) == capacity_) {
      if (oldest_ == kNone) return kNone;
      release(oldest_);
    }
    if (!free_.empty()) {
      node = free_.back();
      free_.pop_back();
    } else {
      if (nodes_.size() == buckets_.size()) double_buckets();
      node = static_cast<int32_t>(nodes_.size());
      nodes_.push_back(Node{});
    }
    const uint32_t life = nodes_[node].life;
    nodes_[node] = Node{kNone, kNone, 0, kNone, kNone, kNone, kNone, kNone, kNone, 0, life};
    return node;
  }

  // Give back the place of a node without children.
  void release(int32_t node) {
    const int32_t parent = nodes_[node].parent;
    if (is_leaf(node)) leave(node);
    if (parent != kNone) {
      leave_bucket(node);
      unlink(node);
      if (is_leaf(parent)) enter_oldest(parent);
    }
    ++nodes_[node].life;
    free_.push_back(node);
  }

  // ---- the leaves, from the oldest to the newest; roots stay whatever happens ----

  bool is_leaf(int32_t node) const {
    return nodes_[node].first_child == kNone && nodes_[node].parent != kNone;
  }

  void leave(int32_t node) {
    const int32_t newer = nodes_[node].newer, older = nodes_[node].older;
    (newer == kNone ? newest_ : nodes_[newer].older) = older;
    (older == kNone ? oldest_ : nodes_[older].newer) = newer;
  }

  void enter_newest(int32_t node) {
    nodes_[node].newer = kNone;
    nodes_[node].older = newest_;
    (newest_ == kNone ? oldest_ : nodes_[newest_].newer) = node;
    newest_ = node;
  }

  void enter_oldest(int32_t node) {
    nodes_[node].older = kNone;
    nodes_[node].newer = oldest_;
    (oldest_ == kNone ? newest_ : nodes_[oldest_].older) = node;
    oldest_ = node;
  }

  // ---- siblings ----

  // In front of all siblings, or of those that were not said more often. A root's children need no order.
  void link(int32_t node) {
    const int32_t parent = nodes_[node].parent;
    int32_t previous = kNone, next = nodes_[parent].first_child;
    if (by_frequency_ && nodes_[parent].parent != kNone) {
      while (next != kNone && nodes_[next].count > nodes_[node].count) {
        previous = next;
        next = nodes_[next].next_sibling;
      }
    }
    nodes_[node].previous_sibling = previous;
    nodes_[node].next_sibling = next;
    (previous == kNone ? nodes_[parent].first_child : nodes_[previous].next_sibling) = node;
    if (next != kNone) nodes_[next].previous_sibling = node;
  }

  void unlink(int32_t node) {
    const int32_t previous = nodes_[node].previous_sibling, next = nodes_[node].next_sibling;
    (previous == kNone ? nodes_[nodes_[node].parent].first_child : nodes_[previous].next_sibling) = next;
    if (next != kNone) nodes_[next].previous_sibling = previous;
  }

  // ---- from a node and a token to the child: chains in buckets ----

  int32_t& bucket(int32_t parent, int32_t token) {
    const uint64_t key = static_cast<uint64_t>(parent) << 32 | static_cast<uint32_t>(token);
    return buckets_[(key * 0x9E3779B97F4A7C15u >> 20) & (buckets_.size() - 1)];
  }

  int32_t find(int32_t parent, int32_t token) {
    int32_t node = bucket(parent, token);
    while (node != kNone && (nodes_[node].parent != parent || nodes_[node].token != token)) {
      node = nodes_[node].next_in_bucket;
    }
    return node;
  }

  void enter_bucket(int32_t node) {
    int32_t& first = bucket(nodes_[node].parent, nodes_[node].token);
    nodes_[node].next_in_bucket = first;
    first = node;
  }

  void leave_bucket(int32_t node) {
    int32_t* place = &bucket(nodes_[node].parent, nodes_[node].token);
    while (*place != node) place = &nodes_[*place].next_in_bucket;
    *place = nodes_[node].next_in_bucket;
  }

  // Every place is in use when this is called, and all but the roots are in a bucket.
  void double_buckets() {
    buckets_.assign(2 * buckets_.size(), kNone);
    for (size_t node = 0; node < nodes_.size(); ++node) {
      if (nodes_[node].parent != kNone) enter_bucket(static_cast<int32_t>(node));
    }
  }

  const int64_t capacity_;
  const int32_t max_depth_, min_breadth_, max_breadth_;
  const bool by_frequency_;
  std::vector<Node> nodes_;
  std::vector<int32_t> free_, buckets_;
  int32_t shared_root_, newest_ = kNone, oldest_ = kNone;
  std::unordered_map<int64_t, Request> requests_;
};

// Exceptions must not leave C++; the only one there can be is that memory is short.
template <typename Function>
int guarded(Function function) {
  try {
    function();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // namespace

extern "C" {

void* ngram_new(int64_t capacity, int32_t max_depth, int32_t min_breadth, int32_t max_breadth,
                int32_t by_frequency) {
  Corpus* corpus = nullptr;
  guarded([&] { corpus = new Corpus(capacity, max_depth, min_breadth, max_breadth, by_frequency != 0); });
  return corpus;
}

void ngram_delete(void* corpus) { delete static_cast<Corpus*>(corpus); }

int64_t ngram_size(void* corpus) { return static_cast<Corpus*>(corpus)->size(); }

// Request i gets tokens[starts[i]] … tokens[starts[i + 1] − 1].
int ngram_append(void* corpus, const int64_t* requests, const int64_t* tokens, const int64_t* starts,
                 int64_t count) {
  return guarded([&] {
    for (int64_t i = 0; i < count; ++i) {
      static_cast<Corpus*>(corpus)->append(requests[i], tokens + starts[i], starts[i + 1] - starts[i]);
    }
  });
}

int ngram_forget(void* corpus, int64_t request) {
  return guarded([&] { static_cast<Corpus*>(corpus)->forget(request); });
}

// Request i has said tokens[starts[i]] … tokens[starts[i + 1] − 1] besides. fields: [5, count, n].
int ngram_match(void* corpus, const int64_t* requests, const int64_t* tokens, const int64_t* starts,
                int64_t count, int32_t n, int64_t* fields) {
  return guarded([&] {
    const int64_t field = count * n;
    for (int64_t i = 0; i < count; ++i) {
      int64_t* first = fields + i * n;
      static_cast<Corpus*>(corpus)->match(requests[i], tokens + starts[i], starts[i + 1] - starts[i], n, first,
                                          first + field, first + 2 * field, first + 3 * field,
                                          first + 4 * field);
    }
  });
}

}  // extern "C"
